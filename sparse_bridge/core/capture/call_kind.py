"""The calls of a model that graphs of the same launches can serve, whatever their number of rows."""

from __future__ import annotations

from typing import Any

from ... import policy, settings
from ..closed_world.guards import Guards
from . import padded


class CallKind:
    """graphs: with memory for so many rows (`capacity`), and shown to be right for no fewer than `least`; the largest
    last. A smaller one is there where many calls are small, as kernels over few rows want other tiles.  attempts: to
    watch a call, then to capture.  guards: of what a watched call read; None: none has been watched.  changes: guards
    that did not hold at the next attempt, since the last capture.  trial: what the trial over a padded input found out,
    if there was one.  comparisons: of replays with the layers.  verified: columns of the box in which inputs may differ
    from the captured one.  replays: by these graphs.  small_calls: of them, since the last capture.  idle: calls in a
    row that the largest graph was not needed for.  served: the number of the model's replay that was the last one here.
    """

    def __init__(self) -> None:
        self.attempts = policy.Attempts(policy.CAPTURE)
        self.graphs: list[Any] = []
        self.replays = self.small_calls = self.idle = self.served = 0
        self.guards: Guards | None = None
        self.changes = policy.Attempts(policy.CAPTURE_CHANGES)
        self.most_rows = self.most_small = 0  # of the calls since the last capture, and of the small ones among them
        self.forget_trial()

    def forget_trial(self) -> None:
        """What was captured or shown is true no more."""
        self.drop_graphs()
        self.trial: Any = None
        self.comparisons = policy.Attempts(policy.COMPARISONS)
        self.verified: set[int] = set()

    def drop_graphs(self) -> None:
        """Let go of the graphs."""
        if self.graphs:  # those that served few calls were not worth it
            self.attempts.learn(self.replays >= policy.REPLAYS_SETTLED)
        self.graphs, self.replays, self.small_calls, self.idle = [], 0, 0, 0
        self.room_for_two = True  # as far as is known: two graphs fit in the GPU's memory

    def make_room(self, capacity: int) -> None:
        """Let go of the graphs whose place one of so many rows takes: a much larger one stays."""
        large = self.graphs[-1:]
        if large and large[0].capacity >= policy.MUCH_SMALLER * capacity:
            self.graphs = large
        else:
            self.drop_graphs()

    def take(self, graph: Any, capacity: int) -> None:
        """The graph of so many rows is captured."""
        graph.verified, graph.capacity, graph.tried = self.verified, capacity, False
        self.graphs.insert(0, graph)
        self.most_rows = self.most_small = self.small_calls = self.idle = 0
        self.changes.learn(True)

    def holds(self) -> bool:
        """Whether a call was watched, and what it read is the same still."""
        return self.guards is not None and self.guards.hold()

    def serving(self, n_rows: int) -> list[Any]:
        """The graphs that have memory for so many rows, the smallest first."""
        return [graph for graph in self.graphs if n_rows <= graph.capacity]

    def comparison_due(self, graph: Any) -> bool:
        """Whether the layers compute a call as well that this graph serves: its first one, and others by schedule."""
        every, first = settings.get().compare_every, not graph.tried
        graph.tried = True
        return every > 0 and (self.comparisons.due() or first or self.comparisons.occasions % every == 0)

    def comparison_ahead(self) -> bool:
        """Whether the next call is likely to be compared."""
        every, number = settings.get().compare_every, self.comparisons.occasions + 1
        fresh = any(not graph.tried for graph in self.graphs)
        return every > 0 and (fresh or not number & (number - 1) or number % every == 0)

    def comparison_showed_nothing(self) -> None:
        """The graph had too little memory for a level: comparisons begin anew after the next call, which may ask for
        a larger one."""
        self.comparisons = policy.Attempts(policy.COMPARISONS)
        self.comparisons.wait = 1

    def smaller_due(self, n_rows: int) -> bool:
        """Whether to try at a call of so many rows to capture a smaller graph, of which there is none."""
        due = self.room_for_two and self.small_calls >= policy.SMALL_CALLS and _is_small(n_rows, self.graphs)
        if due:  # where it fails, the large one serves as many again
            self.small_calls = 0
        return due

    def replayed(self, graph: Any, n_rows: int) -> None:
        """The graph has served a call. Another thread may have let go of it by now, and does not get it back."""
        graphs = self.graphs
        if graph not in graphs:
            return
        self.replays += 1
        if _is_small(n_rows, graphs):
            self.small_calls += 1
            self.most_small = max(self.most_small, n_rows)
        self.idle = 0 if graph is graphs[-1] else self.idle + 1
        if self.idle >= policy.IDLE_CALLS:
            del graphs[1:]
            self.idle = 0

    def capacity_for(self, n_rows: int) -> int:
        """Rows of the graph to be captured at a call of `n_rows`: those of the graph that has no memory for this
        call's levels alone, at least."""
        if _is_small(n_rows, self.graphs):
            return padded.capacity_of(max(n_rows, self.most_small))
        fitted: list[int] = [graph.capacity for graph in self.serving(n_rows)]
        return max([padded.capacity_of(max(n_rows, self.most_rows)), *fitted])


def _is_small(n_rows: int, graphs: list[Any]) -> bool:
    """Whether so many rows fit a much smaller graph than the only one that there is."""
    return len(graphs) == 1 and policy.MUCH_SMALLER * padded.capacity_of(n_rows) <= graphs[0].capacity
