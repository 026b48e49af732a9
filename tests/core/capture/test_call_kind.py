"""When a graph is captured, grows, shrinks, goes, and when a replay is compared with the layers: without a device."""

from __future__ import annotations

import contextlib
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import sparse_bridge
from sparse_bridge import hooks, log, policy, settings
from sparse_bridge.core.capture import graph_capture, graphed_module, padded
from sparse_bridge.core.capture.calls.observers import observer
from sparse_bridge.core.capture.graphed_module import MISSING, GraphedModule
from sparse_bridge.core.geometry.data_bounds import Root
from sparse_bridge.refusals import Refusal, Why


class Guards:
    """value: what a program has; changed by a test."""

    def __init__(self, program):
        self.program, self.seen = program, program.value

    def hold(self):
        return self.program.value == self.seen

    def changed(self):
        return f"value: {self.program.value}, was {self.seen}"


class Program(torch.nn.Module):
    value = 1

    def forward(self, rows):
        return rows


class Memory:
    captured = 0

    def full(self):
        return self.captured >= 4

    def used(self):
        pass


class Call(int):
    """The rows of a call, which may be made again."""

    def repeatable(self):
        return True

    may_run_again = repeatable


class Graphs(GraphedModule):
    """Graphs that are numbers of rows, of calls that are numbers, too.

    events: what was done, in order.  memories: one after the other.
    """

    def __init__(self):
        self.program = Program()  # which nobody else keeps
        super().__init__(self.program, lambda _: None)
        self.events, self.memories, self.wrong, self.last_recording = [], [], None, "recording"
        self.fewest = 0  # rows that a graph is tried with

    def new_memory(self, device, before):
        self.memories.append(Memory())
        return self.memories[-1]

    def allowed(self):
        return True

    possible = allowed

    def execute(self, graph, call, root):
        self.events.append("replay")
        return call

    def recording(self, key, call, root):
        return self.last_recording

    def record_graph(self, kind, key, recording, capacity, call, root, out):
        self.events.append("capture" if kind.trial is None else "capture again")
        kind.trial = True
        self.memory.captured += 1
        captured = SimpleNamespace(differing_columns=lambda root: set())
        maps = SimpleNamespace(serves=lambda box: True, padded_input=SimpleNamespace(refusal=None))
        return SimpleNamespace(captured=captured, maps=maps, alters=False)

    def replay_and_compare(self, graph, call, root, out):
        self.events.append("compare")
        if self.wrong is not None:
            raise self.wrong
        return True

    def call(self, rows, key="kind"):
        """One call with so many rows."""
        kind = self.kind_of(key)
        root = Root(range(rows), None)
        self.events.append(rows)
        result = self.serve(kind, SimpleNamespace(device="cuda", tensors=None), Call(rows), root)
        with result.watch:
            pass
        if result.output is MISSING:
            result.computed(rows)
        return result.output


@pytest.fixture
def graphs(monkeypatch, fake_gpu, request):
    """compared: whether replays are compared with the layers."""
    made = Graphs()
    log.reset()

    class Audit:
        def __init__(self, model, tensors):
            pass

        def __enter__(self):
            made.events.append("watch")

        def __exit__(self, *error):
            pass

        def guards(self):
            return Guards(made.model)

    fake_gpu.has(reserved_memory=0, allocated_memory=0, free_memory=(1 << 30, 1 << 36))
    fake_gpu.has(enter=lambda _: threading.Lock(), graph_pool=object)
    monkeypatch.setattr(graphed_module, "Audit", Audit)
    monkeypatch.setattr(graphed_module, "GraphMemory", made.new_memory)
    monkeypatch.setattr(graphed_module, "fewest_rows", lambda owner, graph, call, root: made.fewest)
    monkeypatch.setattr(Graphs, "wait_for_last_replay", lambda self: None)
    with settings.override(compare_every=256 if getattr(request, "param", None) == "compared" else 0):
        yield made


def kinds_of_calls(events):
    return [event for event in events if not isinstance(event, int)]


def eager(graphs, rows, times):
    """Which of so many calls were not replayed."""
    return [graphs.call(rows) is MISSING for _ in range(times)]


def warm(graphs, rows=1000):
    eager(graphs, rows, 3)
    assert kinds_of_calls(graphs.events) == ["watch", "capture"]
    graphs.events.clear()


def test_the_first_graph_is_for_the_largest_of_the_first_calls(graphs, rules):
    rules.set(policy, CAPTURE=policy.CAPTURE._replace(skip_first=6))  # as it is for users
    rows = (900, 40_000, 10, 500, 3, 7, 2, 8)
    assert [graphs.call(number) for number in rows] == [MISSING] * 8
    assert graphs.events == [*rows[:7], "watch", rows[7], "capture"]
    assert graphs.graphs[0].capacity == padded.capacity_of(40_000)
    assert graphs.call(40_000) is not MISSING


def test_one_graph_serves_all_that_is_smaller(graphs):
    warm(graphs, 5000)
    for rows in (5000, 1, 300, 4999, padded.capacity_of(5000)):
        assert graphs.call(rows) is not MISSING
    assert set(kinds_of_calls(graphs.events)) == {"replay"} and len(graphs.graphs) == 1


def test_fewer_rows_than_a_graph_was_tried_with(graphs):
    """They are compared, also where comparisons are off; then so many are replayed."""
    graphs.fewest = 64
    warm(graphs, 5000)
    rows = (64, 50, 50, 63, 40, 40)
    assert [graphs.call(number) is MISSING for number in rows] == [False, True, False, False, True, False]
    assert kinds_of_calls(graphs.events).count("compare") == 2
    graphs.wrong = Refusal(Why.GRAPH_OTHER_BITS, "output 0", 1.0, 1)
    assert graphs.call(40) is not MISSING and graphs.call(39) is MISSING and graphs.call(5000) is MISSING
    assert "GRAPH_DIFFERS" in graphs.why()


@pytest.mark.usefixtures("errors_survived")
def test_an_audit_that_fails(graphs, monkeypatch):
    """The call has its result, and the model stays eager."""

    def guards(self):
        raise ValueError("a dictionary whose values() are fewer than its keys")

    monkeypatch.setattr(graphed_module.Audit, "guards", guards)
    assert eager(graphs, 1000, 8) == [True] * 8
    assert "GRAPH_ERROR" in graphs.why() and "fewer than its keys" in graphs.why()


def test_a_graph_stays_where_no_larger_one_can_be_captured_for_now(graphs):
    """As inputs have not all had the same requests of late."""
    warm(graphs, 5000)
    graphs.last_recording = None
    for _ in range(policy.CAPTURE_INCONCLUSIVE.failures + 1):
        assert graphs.call(100_000) is MISSING and graphs.call(5000) is not MISSING
    assert "capture again" not in graphs.events and graphs.given_up() is None
    graphs.last_recording = "recording"
    assert graphs.call(100_000) is MISSING and graphs.call(100_000) is not MISSING
    assert not graphs.inconclusive.over


def test_calls_that_were_no_capture_while_a_graph_served_count_for_nothing(graphs):
    """What changes later is captured as ever."""
    warm(graphs, 5000)
    graphs.last_recording = None
    eager(graphs, 100_000, policy.CAPTURE_INCONCLUSIVE.failures + 1)
    assert not any(eager(graphs, 5000, policy.REPLAYS_SETTLED))
    graphs.last_recording, graphs.model.value = "recording", 2
    assert eager(graphs, 5000, 4) == [True, True, False, False]


def test_streams_of_any_sizes_need_few_captures(graphs):
    """2,000 to 250,000 rows."""
    generator = torch.Generator().manual_seed(0)
    sizes = (2000 * 125 ** torch.rand(1000, generator=generator)).int().tolist()
    outputs = [graphs.call(rows) for rows in sizes]
    assert kinds_of_calls(graphs.events).count("capture") == 1
    assert kinds_of_calls(graphs.events).count("capture again") <= 6
    assert all(output is not MISSING for output in outputs[100:]) or outputs[20:].count(MISSING) <= 10


def test_many_small_scenes_get_a_graph_of_their_own(graphs):
    """The large scenes between them keep theirs."""
    warm(graphs, 100_000)
    for _ in range(policy.SMALL_CALLS):
        assert graphs.call(90_000) is not MISSING and graphs.call(30_000) is not MISSING
    assert graphs.call(90_000) is not MISSING
    assert graphs.call(20_000) is MISSING and graphs.events[-1] == "capture again"
    sizes = [graph.capacity for graph in graphs.graphs]
    assert sizes == [padded.capacity_of(30_000), padded.capacity_of(100_000)]
    served = []
    graphs.execute = lambda graph, call, root: served.append(graph.capacity) or call
    for rows in (30_000, 40_000, 5, 90_000):
        assert graphs.call(rows) is not MISSING
    assert served == [sizes[0], sizes[1], sizes[0], sizes[1]]
    assert not any(eager(graphs, 40_000, 2 * policy.SMALL_CALLS))  # no third graph
    assert len(graphs.graphs) == 2


def test_a_smaller_graph_is_for_small_calls_alone(graphs):
    """Not for a larger one that could not be captured."""
    warm(graphs, 100_000)
    graphs.last_recording = None
    assert graphs.call(400_000) is MISSING
    graphs.last_recording = "recording"
    eager(graphs, 3000, policy.SMALL_CALLS + 1)
    assert [graph.capacity for graph in graphs.graphs] == [padded.capacity_of(3000), padded.capacity_of(100_000)]


def test_what_no_graph_can_serve_stands_against_no_later_call(graphs, monkeypatch):
    """Also where a smaller graph is due at that one."""
    warm(graphs, 100_000)
    eager(graphs, 3000, policy.SMALL_CALLS)
    (large,) = graphs.graphs
    refuse = SimpleNamespace(refusal=None)

    def serves(box):
        refuse.refusal = None
        return True

    def execute(graph, call, root):
        refuse.refusal = Why.GRAPH_DUPLICATES
        return MISSING

    large.maps = SimpleNamespace(serves=serves, padded_input=refuse)
    with monkeypatch.context() as patch:
        patch.setattr(graphs, "execute", execute)
        before = graphs.events.count("capture again")
        assert graphs.call(100_000) is MISSING and graphs.events.count("capture again") == before
    assert Why.GRAPH_DUPLICATES.name in graphs.declined
    graphs.call(3000)
    assert len(graphs.graphs) == 2


def test_where_no_smaller_graph_can_be_captured_the_large_one_serves(graphs):
    warm(graphs, 100_000)
    graphs.last_recording = None
    assert sum(eager(graphs, 3000, 4 * policy.SMALL_CALLS)) == 3 and len(graphs.graphs) == 1


@pytest.mark.parametrize("error", [Refusal(Why.GRAPH_NO_ROOM), torch.OutOfMemoryError()])
def test_where_memory_is_too_small_for_two_graphs_the_large_one_serves(graphs, monkeypatch, error):
    """It is tried once, and what changes later is captured as ever."""
    warm(graphs, 100_000)
    with monkeypatch.context() as patch:
        patch.setattr(graphed_module, "check_room", lambda *_: (_ for _ in ()).throw(error))
        assert sum(eager(graphs, 3000, 4 * policy.SMALL_CALLS)) == 1
    assert len(graphs.graphs) == 1 and graphs.given_up() is None
    graphs.model.value = 2
    assert eager(graphs, 100_000, 4) == [True, True, False, False]


def test_where_the_small_graph_has_too_little_room_the_large_one_serves(graphs):
    warm(graphs, 100_000)
    eager(graphs, 30_000, policy.SMALL_CALLS + 1)
    small, large = graphs.graphs
    graphs.execute = lambda graph, call, root: MISSING if graph is small else call
    assert graphs.call(30_000) is not MISSING and graphs.graphs == [small, large]


def test_where_a_level_has_too_little_room_the_next_graph_is_no_smaller(graphs):
    warm(graphs, 100_000)
    graphs.execute = lambda graph, call, root: MISSING
    assert graphs.call(70_000) is MISSING and graphs.events[-1] == "capture again"
    assert [graph.capacity for graph in graphs.graphs] == [padded.capacity_of(100_000)]


def test_a_large_graph_that_is_not_needed_goes(graphs):
    warm(graphs, 100_000)
    eager(graphs, 3000, policy.SMALL_CALLS + 1 + policy.IDLE_CALLS - 1)
    graphs.call(90_000)
    eager(graphs, 3000, policy.IDLE_CALLS - 1)
    assert len(graphs.graphs) == 2
    graphs.call(3000)
    (graph,) = graphs.graphs
    assert graph.capacity == padded.capacity_of(3000)
    assert graphs.call(90_000) is MISSING and graphs.events[-1] == "capture again"
    assert [graph.capacity for graph in graphs.graphs] == [padded.capacity_of(90_000)]


def test_another_thread_lets_go_of_a_graph_that_has_just_served(graphs, rules):
    """As it captures a larger one, or sees that the program changed. The call has its result, and the graph is gone."""
    rules.set(policy, IDLE_CALLS=1)
    warm(graphs, 100_000)
    eager(graphs, 3000, policy.SMALL_CALLS)
    assert graphs.call(3000) is MISSING and len(graphs.graphs) == 2
    (kind,) = graphs.kinds.values()
    graphs.execute = lambda graph, call, root: kind.drop_graphs() or call
    assert graphs.call(3000) is not MISSING and not graphs.graphs


def test_what_changes_once_costs_a_capture(graphs):
    warm(graphs)
    eager(graphs, 1000, policy.REPLAYS_SETTLED)
    graphs.events.clear()
    graphs.model.value = 2
    assert eager(graphs, 1000, 4) == [True, True, False, False]
    assert kinds_of_calls(graphs.events) == ["watch", "capture", "replay", "replay"]
    assert graphs.why() is None


def test_what_changes_in_every_call_is_tried_less_and_less(graphs):
    warm(graphs)
    for number in range(2000):
        graphs.model.value = number
        assert graphs.call(1000) is MISSING
    assert "capture" not in graphs.events
    assert "value: " in graphs.why() and "GRAPH_CHANGED" in graphs.why()


def test_what_changes_now_and_then_is_tried_less_and_less(graphs):
    """Every fourth call: a graph serves two at most."""
    for number in range(2000):
        graphs.model.value = number // 4
        graphs.call(1000)
    assert kinds_of_calls(graphs.events).count("capture") <= 16


@pytest.mark.parametrize("graphs", ["compared"], indirect=True)
def test_which_replays_are_compared(graphs):
    warm(graphs)
    compared = [number for number in range(1, 1100) if graphs.call(1000) is MISSING]
    assert compared == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024]
    assert graphs.call(5000) is MISSING and graphs.call(5000) is MISSING  # captured, and compared at its first replay
    assert graphs.events[-4:] == [5000, "capture again", 5000, "compare"]
    assert not any(eager(graphs, 5000, 100))  # the kind is known by now


@pytest.mark.parametrize("graphs", ["compared"], indirect=True)
def test_a_comparison_that_a_graph_has_too_little_room_for(graphs, monkeypatch):
    """It shows nothing, so that it is made again, but not at the next call: that one may need a larger graph."""
    warm(graphs)
    with monkeypatch.context() as patch:
        patch.setattr(graphs, "replay_and_compare", lambda *_: False)
        assert graphs.call(1000) is MISSING
    assert eager(graphs, 1000, 5) == [False, True, False, True, False]
    monkeypatch.setattr(graphs, "replay_and_compare", lambda *_: False)
    monkeypatch.setattr(graphs, "execute", lambda *_: MISSING)
    assert "capture again" not in graphs.events
    eager(graphs, 1000, 6)
    assert "capture again" in graphs.events


@pytest.mark.parametrize("graphs", ["compared"], indirect=True)
@pytest.mark.parametrize(("every", "expected"), [(1, 20), (5, 5 + 4), (0, 0)])
def test_the_rate_of_comparisons_is_a_setting(graphs, every, expected):
    warm(graphs)
    with settings.override(compare_every=every):
        assert sum(eager(graphs, 1000, 20)) == expected


@pytest.mark.parametrize("graphs", ["compared"], indirect=True)
def test_a_difference_ends_all_replays_and_says_so(graphs, caplog):
    warm(graphs)
    eager(graphs, 1000, 7)
    graphs.wrong = Refusal(Why.GRAPH_OTHER_BITS, "output 0", 1.0, 1)
    outputs = [graphs.call(1000) for _ in range(100)]
    assert outputs[:1] == [MISSING] and not graphs.graphs and graphs.given_up() is not None
    assert "a replay gave something else than the layers" in caplog.text and "GRAPH_DIFFERS" in graphs.why()


@pytest.mark.parametrize("graphs", ["compared"], indirect=True)
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Refusal(Why.GRAPH_BUFFER, "seen"), "GRAPH_DIFFERS"),
        (RuntimeError("no"), "GRAPH_ERROR"),
        (torch.OutOfMemoryError("no"), "GRAPH_NO_ROOM"),
    ],
)
def test_a_comparison_that_fails_does_not_end_the_program(graphs, error, code):
    warm(graphs)
    graphs.wrong = error
    assert all(eager(graphs, 1000, 7)) and not graphs.graphs and code in graphs.why()


def out_of_memory(*_):
    raise torch.OutOfMemoryError


@pytest.mark.parametrize("trains", [False, True])
def test_a_replay_without_memory_for_its_output(graphs, monkeypatch, trains):
    """The layers run in its place; but of a step they would move statistics once more."""
    warm(graphs)
    monkeypatch.setattr(graphs, "execute", out_of_memory)
    monkeypatch.setattr(graphs, "trains", trains)
    with pytest.raises(torch.OutOfMemoryError) if trains else contextlib.nullcontext():
        assert all(eager(graphs, 1000, 5)) and "GRAPH_NO_ROOM" in graphs.why() and not graphs.graphs


def test_several_kinds_of_calls_have_a_graph_each_up_to_a_number(graphs):
    for key in range(policy.GRAPHS + 1):
        for _ in range(3):
            graphs.call(1000, key)
        graphs.call(1000, key)
    assert len(graphs.graphs) == policy.GRAPHS
    assert not graphs.kinds[0].graphs and graphs.call(1000, policy.GRAPHS) is not MISSING


@pytest.mark.parametrize("asked", [False, True])
def test_a_graph_that_serves_few_of_the_calls(graphs, asked):
    """Goes, as parts of the model may be served, unless the program wants this model replayed; and it is said why."""
    graphs.asked = asked
    warm(graphs)
    served = 0
    for key in range(policy.CALL_KINDS):
        if key < policy.GRAPHS:
            assert graphs.why() is None
        served += graphs.call(1000, key) is MISSING
        assert key < policy.GRAPHS or "GRAPH_NEW_KINDS" in graphs.why()
    assert served == policy.CALL_KINDS and bool(graphs.graphs) == asked and "ever new kinds" in graphs.given_up()


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("kinds", [4, 5, 8, 15])
def test_more_kinds_than_are_kept_in_turns(graphs, rules, kinds, asked):
    """Graphs take each other's place, so that they go, unless the program wants this model replayed."""
    rules.set(policy, CAPTURE=policy.CAPTURE._replace(skip_first=6))  # as it is for users
    graphs.asked, calls = asked, 0
    while graphs.given_up() is None and calls < 20 * kinds:
        graphs.call(1000, calls % kinds)
        calls += 1
    assert "GRAPH_NEW_KINDS" in graphs.given_up() and calls <= 8 * kinds + 30
    for number in range(20 * kinds):
        graphs.call(1000, number % kinds)
    assert bool(graphs.graphs) == asked and (not asked or graphs.hits > 40)


@pytest.mark.parametrize("rare", [10, 25, 100])
@pytest.mark.parametrize("kinds", [1, 2, 3])
def test_few_kinds_and_rare_others(graphs, rules, kinds, rare):
    """A validation batch, a last smaller one: they keep their graphs."""
    rules.set(policy, CAPTURE=policy.CAPTURE._replace(skip_first=6))
    for number in range(4000):
        key = f"rare {number // rare % 5}" if number % rare == rare - 1 else number % kinds
        graphs.call(1000, key)
        assert graphs.given_up() is None, number
    assert graphs.hits > 0.8 * 4000


def test_a_graph_that_serves_most_of_the_calls(graphs):
    """Stays, and kinds that came once are forgotten when there are many."""
    warm(graphs)
    for key in range(2 * policy.KINDS_KEPT):
        graphs.call(1000, key)
        assert graphs.call(1000) is not MISSING and len(graphs.kinds) <= policy.KINDS_KEPT
    assert graphs.graphs and graphs.given_up() is None


def test_graphs_go_together_when_many_have_gone_before(graphs):
    """torch's graphs of one stream stay as long as one of them serves, so that all must go at times."""

    def calls(key, rows):
        """How many of so many that graphs are worth their capture were eager."""
        return sum(graphs.call(rows, key) is MISSING for _ in range(policy.REPLAYS_SETTLED + 3))

    calls("other", 1000)
    for rows in (1000, 3000, 9000):
        calls("kind", rows)
    assert len(graphs.memories) == 1 and len(graphs.graphs) == 2  # four were captured
    assert calls("kind", 30_000) == 1
    assert len(graphs.memories) == 2 and len(graphs.graphs) == 1
    assert calls("other", 1000) == 1
    assert len(graphs.memories) == 2 and len(graphs.graphs) == 2


def test_a_graph_that_leaves_no_room_is_not_kept(graphs, monkeypatch):
    monkeypatch.setattr(graphed_module, "check_room", lambda *_: (_ for _ in ()).throw(Refusal(Why.GRAPH_NO_ROOM)))
    assert all(eager(graphs, 1000, 6))
    assert not graphs.graphs and "GRAPH_NO_ROOM" in graphs.why()


@pytest.mark.parametrize(
    "free, under_way, fits", [(600, 0, True), (599, 0, False), (600, 750, True), (600, 751, False), (700, 800, True)]
)
def test_room_for_a_graph(fake_gpu, free, under_way, fits):
    """500 bytes of a graph beside 1,000 that the program has used at once, of which 400 are still reserved; or beside a
    step whose backward pass is still to come."""
    fake_gpu.has(reserved_memory=900, free_memory=(free, 1 << 20))
    with contextlib.nullcontext() if fits else pytest.raises(Refusal):
        assert graph_capture.check_room(1000, 400, under_way) == 500


@pytest.mark.parametrize("trains, free, stays", [(True, 1999, False), (True, 2000, True), (False, 0, True)])
def test_graphs_go_where_a_larger_step_might_not_fit_beside_them(graphs, fake_gpu, monkeypatch, trains, free, stays):
    """It would run out of memory in its backward pass. An inference that does is begun again."""
    monkeypatch.setattr(graphed_module, "check_room", lambda *_: 1000)
    monkeypatch.setattr(graphs, "trains", trains)
    warm(graphs, 5000)
    graphs.last_recording = None  # nothing is captured again for now
    fake_gpu.has(free_memory=(free, 1 << 20))
    room = graphs.graphs[0].capacity
    assert graphs.call(room) is not MISSING and graphs.call(2 * room) is MISSING
    assert bool(graphs.graphs) == (graphs.call(5000) is not MISSING) == stays
    graphs.last_recording = "recording"
    eager(graphs, 5000, 4)
    assert graphs.call(5000) is not MISSING, "they are captured again"


@pytest.mark.parametrize("graphs", ["compared"], indirect=True)
@pytest.mark.parametrize("trains, cached, free", [(True, 0, 999), (True, 1998, 1), (True, 1999, 1), (False, 0, 0)])
def test_a_step_is_compared_where_it_fits_beside_its_graph(graphs, fake_gpu, monkeypatch, trains, cached, free):
    """In what is free on the GPU, or kept by the allocator for none of the graphs."""
    monkeypatch.setattr(graphed_module, "check_room", lambda *_: 1000)
    monkeypatch.setattr(graphs, "trains", trains)
    warm(graphs, 5000)
    fake_gpu.has(free_memory=(free, 1 << 20), reserved_memory=5000 + cached, allocated_memory=5000)
    for _ in range(4):
        graphs.call(graphs.graphs[0].capacity)
    assert ("compare" in graphs.events) == (not trains or free + max(0, cached - 1000) >= 1000)


@contextlib.contextmanager
def traced():
    before = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        yield
    finally:
        sys.settrace(before)


ONLOOKERS = {
    "trace": traced,
    "saved": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    "mode": type("Counting", (TorchDispatchMode,), {}),
    "function mode": type("Counting", (TorchFunctionMode,), {}),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "forward mode": torch.autograd.forward_ad.dual_level,
}


@pytest.mark.parametrize("case", [*ONLOOKERS, "vmap", "nobody", "a default device"])
def test_onlookers(case):
    seen = []
    if case == "vmap":
        torch.func.vmap(lambda x: seen.append(observer()) or x)(torch.ones(2))
    else:
        nobody = {"nobody": contextlib.nullcontext, "a default device": lambda: torch.device("cpu")}
        with (ONLOOKERS | nobody)[case]():
            seen.append(observer())
    if case in ("nobody", "a default device"):
        assert seen[0] is None or "debugger" in seen[0]  # under a debugger, or where coverage is measured
    else:
        assert seen[0] is not None


def test_calls_and_models_that_are_to_stay_eager():
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    assert hooks.may_be_replayed(model)
    with sparse_bridge.eager():
        with sparse_bridge.eager():
            pass
        assert not hooks.may_be_replayed(model)
    sparse_bridge.optimize(model, graphs=False)
    assert not hooks.may_be_replayed(model) and not hooks.may_be_replayed(model[0])
    sparse_bridge.restore(model)
    assert hooks.may_be_replayed(model) and hooks.may_be_replayed(model[0])


@pytest.mark.parametrize(
    "text", ["graphs:7", "auto:7", "fuse", "graphs:0", "graphs:-1", "graphs:x", "graphs:", "none:1"]
)
def test_the_rate_in_the_environment(text):
    mode, _, number = text.partition(":")
    good = mode != "none" and (number.isdigit() or ":" not in text)
    with contextlib.nullcontext() if good else pytest.raises(sparse_bridge.errors.SettingError):
        read = settings.from_environment({"SPARSE_BRIDGE_OPTIMIZE": text})
        assert read.optimize == mode and read.compare_every == int(number or 256)
