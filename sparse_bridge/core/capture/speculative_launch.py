"""Launches that are queued before a call has been checked, and which of them are taken."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ... import policy
from ..geometry.data_bounds import Root
from ..maps.coordinate_map import CoordinateMap
from . import graph_key
from .call_kind import CallKind


class SpeculativeLaunch:
    """Launches that are queued before a call has been checked, by the rows of its input alone.

    A wrong guess costs the GPU that work. Nobody sees its results; statistics of norms are put back. The lock of the
    model's graphs, the owner, is held meanwhile: all share their memory.
    """

    def __init__(self) -> None:
        self.started: Any = None  # the graph whose maps are queued for the call under way
        self.launched: Any = None  # the same graph, if its work on features is queued, too, and still to be taken
        self._guesses = policy.Attempts(policy.GUESSES)
        # The graph whose maps are queued for a call to come, over which coordinates; attempts at that.
        self._expected: tuple[Any, torch.Tensor, int] | None = None
        self._announced = policy.Attempts(policy.GUESSES)

    def launch_announced(self, owner: Any, cmap: CoordinateMap) -> bool:
        """Queue the maps of the graph that will probably serve new coordinates, whose bounds are
        still to be learnt; whether it does. Waits for the first of its launches."""
        assert cmap.data_bounds is not None
        coords, root = cmap.coords, Root(cmap.coords, cmap.data_bounds)
        graph = _fitting(owner.latest, coords) if self._announced.due() else None
        if coords.is_inference():  # nobody counts what is written to them until the call
            return False
        if graph is None or not graph.maps.exact:
            return False
        with owner.lock, torch.cuda.device(cmap.device):
            if not (owner.allowed() and graph_key.why_not_capturable(coords) is None):
                return False
            owner.start(graph, root)
            served: bool = graph.maps.learn(root)
            self._expected = (graph, coords, coords._version) if served else None
            if not served:
                self._announced.failed()
        return served

    def discard(self) -> None:
        """Drop what is queued for a call to come, as it is overwritten."""
        if self._expected is not None:
            self._expected = None
            self._announced.failed()

    def claim(self, graph: Any, coords: torch.Tensor) -> bool:
        """Whether the maps that are queued are those of a graph over these coordinates."""
        expected, self._expected = self._expected, None
        if expected is None:
            return False
        claimed = expected[0] is graph and expected[1] is coords and expected[2] == coords._version
        self._announced.learn(claimed)
        return claimed

    @contextlib.contextmanager
    def launch(self, owner: Any, root: Root, features: torch.Tensor) -> Iterator[None]:
        """Queue the graph that will probably serve an input, if one can be predicted."""
        graph = self.predict(owner.latest, root)
        if graph is None:
            yield
            return
        with owner.lock, torch.cuda.device(root.coords.device):
            try:  # whatever interrupts it, a Ctrl-C or a signal's handler: the next call has other coordinates
                if owner.allowed():  # still: another thread may be in the middle of a step
                    if self.claim(graph, root.coords):
                        owner.wait_for_last_replay()
                    else:
                        owner.start(graph, root)
                    self.started = graph
                    if root.bounds_known or graph.maps.learn(root):
                        self.launched = graph if owner.launch_speculatively(graph, root, features) else None
                yield
            finally:
                self.undo()
                self.started = None

    def take(self, graph: Any) -> bool:
        """Whether what a graph does with the features of the call under way is queued already. The call takes it."""
        if self.launched is not graph:
            return False
        self.launched = None
        return True

    def undo(self) -> None:
        """Nobody takes what is queued: models have the state from before."""
        launched, self.launched = self.launched, None
        if launched is not None:
            launched.undo()

    def predict(self, latest: CallKind | None, root: Root) -> Any:
        """The graph that will probably serve an input, if its call is of the kind `latest`; None where none can."""
        graph = _fitting(latest, root.coords) if self._guesses.due() else None
        if graph is None:
            return None
        bounds_known = root.bounds_known or not graph.maps.exact  # else whether it serves turns out later
        return None if bounds_known and not graph.maps.serves(root.box) else graph

    def confirm(self, graph: Any) -> None:
        """Learn which graph serves the call under way; None: an eager call."""
        if self.started is not None and (graph is not self.started or self._guesses.failures):
            self._guesses.learn(graph is self.started)


def _fitting(latest: CallKind | None, coords: torch.Tensor) -> Any:
    """The smallest graph that has memory for these rows."""
    return None if latest is None else next(iter(latest.serving(len(coords))), None)
