"""The calls of a model that one graph can serve, whatever their number of rows."""

from __future__ import annotations

from typing import Any

from .... import policy
from .. import padded
from ..closed_world.guards import Guards


class CallKind:
    """graph: of the largest class of rows so far, or None.  attempts: to watch a call, then to
    capture.  guards: of what a watched call read; None: none has been watched.  trial: what the
    trial over a padded input found out, if there was one.  verified: columns of the box in which inputs may differ
    from the captured one.  replays: by this graph.
    """

    def __init__(self) -> None:
        self.attempts = policy.Attempts(policy.CAPTURE)
        self.graph: Any = None
        self.replays = self.small_calls = 0
        self.guards: Guards | None = None
        self.most_rows = 0  # of the calls since the last capture, or of those that a smaller graph would fit
        self.forget_trial()

    def forget_trial(self) -> None:
        """What was captured or shown is true no more."""
        self.drop_graph()
        self.trial: Any = None
        self.verified: set[int] = set()
        self.compared = policy.Attempts(policy.COMPARISONS)

    def drop_graph(self) -> None:
        """Let go of the graph, so that another takes its place."""
        if self.graph is not None:  # one that served few calls was not worth it
            self.attempts.learn(self.replays >= policy.REPLAYS_SETTLED)
        self.graph, self.replays, self.small_calls = None, 0, 0

    def take(self, graph: Any, capacity: int) -> None:
        """The graph of so many rows is captured."""
        graph.verified, graph.capacity, graph.served = self.verified, capacity, 0
        self.graph, self.most_rows = graph, 0

    def holds(self) -> bool:
        """Whether a call was watched, and what it read is the same still."""
        return self.guards is not None and self.guards.hold()

    def too_large(self) -> bool:
        """Whether so many calls in a row would fit a much smaller graph that one is worth its capture."""
        return self.small_calls >= policy.SMALL_CALLS

    def replayed(self, n_rows: int) -> None:
        """The graph has served a call."""
        self.replays += 1
        if policy.MUCH_SMALLER * padded.capacity_of(n_rows) > self.graph.capacity:
            self.small_calls = self.most_rows = 0
        else:
            self.small_calls += 1
            self.most_rows = max(self.most_rows, n_rows)

    def capacity_for(self, n_rows: int) -> int:
        """Rows of the graph to be captured at a call of `n_rows`."""
        return padded.capacity_of(max(n_rows, self.most_rows))
