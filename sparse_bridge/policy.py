"""Thresholds and back-off of every optional fast path, and one value that counts attempts.

What is learnt of earlier calls may be wrong about the next one, and learning costs more than a
call. So each way waits for some calls, is tried less and less often, and ends after failures.
Sizes from which a way pays, seconds of waits and all that concerns kernels stand where they are
used.
"""

from __future__ import annotations

from typing import NamedTuple

ENDLESS = 1 << 62


class Schedule(NamedTuple):
    """On which occasions an attempt is due.

    skip_first: occasions that pass before the first attempt.  always_until: of those that follow, the first
    so many are due; then those whose number, counted from there, is a power of two.  max_tries: attempts
    in all.  failures: in a row, or in all where successes are not counted, that end the attempts.
    longest_wait: occasions; after failures in a row 2, 4, 8, ... of them pass, up to this.  patience: how many of
    those failures cost no wait.
    """

    skip_first: int = 0
    always_until: int = ENDLESS
    max_tries: int = ENDLESS
    failures: int = ENDLESS
    longest_wait: int = 0
    patience: int = 0


class Attempts:
    """How often something was tried by a schedule, and what came of it.

    occasions: so far.  tries: those that were due.  failures: since the last success.  wait:
    occasions to let pass.  over: there are no more attempts; an attribute, as steady calls ask it.
    """

    __slots__ = ("failures", "occasions", "over", "schedule", "tries", "wait")

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.over = schedule, False
        self.occasions = self.tries = self.failures = self.wait = 0

    def due(self) -> bool:
        """Count an occasion; whether to try."""
        self.occasions += 1
        if self.over:
            return False
        if self.wait:
            self.wait -= 1
            return False
        schedule, number = self.schedule, self.occasions - self.schedule.skip_first
        if number <= 0 or (number > schedule.always_until and number & (number - 1)):
            return False
        self.tries += 1
        self.over = self.tries >= schedule.max_tries
        return True

    def failed(self) -> None:
        """Learn that an attempt was for nothing."""
        schedule = self.schedule
        self.failures += 1
        self.over = self.over or self.failures >= schedule.failures
        late = self.failures - schedule.patience
        self.wait = min(schedule.longest_wait, 1 << min(late, schedule.longest_wait.bit_length())) if late > 0 else 0

    def learn(self, success: bool) -> None:
        """Learn whether an attempt was of use."""
        if success:
            self.failures, self.over = 0, self.tries >= self.schedule.max_tries
        else:
            self.failed()

    def give_up(self) -> None:
        """Try no more, whatever the schedule says."""
        self.over = True


# Prefetched maps. A scene that is not like the one before costs its maps twice.
INPUTS_ALIKE = 2  # that were asked the same before the next is prefetched; one says nothing of another
REQUESTS = 64  # remembered of an input; networks have fewer, and a program without end must not fill memory
REQUEST_LISTS = 256  # of inputs with the same first request; more are no network, and all are forgotten
FIRST_REQUESTS = 256  # that are told apart: a few for each network of a process
BOXES = 64  # of inputs, by which a capture finds what was asked there
PREFETCH = Schedule(longest_wait=1 << 10)  # inputs that are never alike cost one attempt in a thousand

# Graphs of models. A capture runs the model several times, and a graph holds memory.
LEAST_LAYERS = 4  # of a part of a model; fewer launch too little to be worth a graph
CAPTURE = Schedule(skip_first=6, longest_wait=1 << 10)  # calls of a kind: one is watched, the next captured
CAPTURE_FAILURES = Schedule(failures=2)  # one may be an accident, such as a full memory
CAPTURE_INCONCLUSIVE = Schedule(failures=8)  # trials that showed nothing; the next input often tells
CAPTURE_CHANGES = Schedule(failures=4)  # of what a watched call read, at the next one; then it changes at each
OTHER_INPUTS = Schedule(failures=4, longest_wait=64)  # with maps of their own, or points; then modules inside are tried
CALL_KINDS = 16  # of a model's calls, if graphs serve fewer calls than that: every call is a new one
KINDS_KEPT = 256  # of a model's calls; when there are more, those that no graph serves are forgotten
VAIN_GRAPHS = 3  # that went for others before they had served REPLAYS_SETTLED calls; those are of too many kinds
HINDERED = Schedule(failures=8)  # calls that hooks or modes stand against; then modules inside are tried
HINDERED_AGAIN = Schedule(longest_wait=1 << 10)  # looks at such a module again, as hooks may be gone
GRAPHS = 3  # of a model, for as many kinds of calls; the one that has not served for longest goes
STREAM_GRAPHS = 96  # that were captured on one stream, as they go together; a model has at most 24 in use
COMPARISONS = Schedule(always_until=1, max_tries=9)  # replays 1, 2, 4 ... 256 of a kind are compared with the layers
SMALL_CALLS = 64  # that would fit a graph of
MUCH_SMALLER = 2  # times fewer rows: then one is captured besides
IDLE_CALLS = 256  # in a row that the smaller graph has served; then the larger one goes
UNDONE_BYTES = 1 << 22  # of buffers, which a step keeps so that its forward pass can be queued before its checks
# Of the graph that will serve; a wrong one costs the GPU its maps, and to guess no more a third of a replay's time.
GUESSES = Schedule(longest_wait=64, patience=2)
ANNOUNCED_KINDS = 64  # of inputs, whose models are remembered; all are forgotten when there are more
REPLAYS_SETTLED = 16  # in a row, after which eager calls are taken to be over
MEMORY_RETURNS = Schedule(always_until=8)  # each costs the next eager call its allocations

# Deferred convolutions. A wrong guess costs a launch.
CALLS_ALONE = 3  # in a row; a layer that nothing follows in one more is not deferred again
EARLY_LAUNCHES = Schedule(failures=3)  # with steps that did not come; then launches are deferred to the steps
FUSED_PLANS = Schedule(max_tries=8)  # of a layer; one that needs more changes in every call
NORM_CALLS = Schedule(max_tries=2)  # of a layer in training, whose features show which norm takes them

# Plans, which hold no memory of a device.
PLANS = 1 << 16  # of convolutions under the same settings; far above any program's
PLAN_SETTINGS = 8  # whose plans are kept, for programs that change settings and go back

# Other things that are given up.
OUTSIDE_LOOKS = Schedule(max_tries=8)  # at scenes with dead rows; a network may pad every scene with such rows
SERVER_STARTS = Schedule(failures=3)  # compile servers in a row that end before they serve
FORMS_IN_VAIN = 3  # that workers compiled and the disk cache does not have, and most of all forms
