"""Backward passes by layer: hooks on the nodes of the gradient's graph that a layer made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .clock import Interval


class Gradients:
    """Times of backward nodes, given to whatever made them.

    The nodes are not kept, so their memory goes when it would without. `stop` removes all hooks.
    """

    def __init__(self) -> None:
        self.times: list[tuple[Any, Interval]] = []  # (owner, one run of one node)
        self.now = 0  # calls watched so far
        self._handles: list[Any] = []
        self._claimed: Any = object()  # a key in the notes that nodes keep
        self._running = True

    def watch(
        self, owner: Any, began: int, outputs: Iterable[torch.Tensor], stops: Iterable[Any], device: torch.device | None
    ) -> None:
        """Time the nodes between `outputs` and `stops`, the nodes that made the inputs, but those
        of calls inside.  began: `now` when the call began."""
        self.now += 1
        for node in self._made(began, outputs, list(stops)):
            self._hook(owner, node, device)

    def _made(self, began: int, outputs: Iterable[torch.Tensor], stops: list[Any]) -> Iterator[Any]:
        """Nodes that nobody has claimed, back to the parameters, the stops, and what others had
        claimed before."""
        waiting, passed = [tensor.grad_fn for tensor in outputs], set(stops)
        while waiting:
            node: Any = waiting.pop()
            if node is None or node in passed or type(node).__name__ == "AccumulateGrad":
                continue
            passed.add(node)
            claimed = node.metadata.get(self._claimed)
            if claimed is None:
                node.metadata[self._claimed] = self.now
                yield node
            elif claimed <= began:
                continue
            waiting.extend(before for before, _ in node.next_functions)

    def _hook(self, owner: Any, node: Any, device: torch.device | None) -> None:
        begun: list[Interval] = []

        def before(*_: Any) -> None:
            if self._running:
                begun.append(Interval(device).start())

        def after(*_: Any) -> None:
            if begun:
                interval = begun.pop()
                interval.stop()
                self.times.append((owner, interval))

        self._handles += [node.register_prehook(before), node.register_hook(after)]

    def stop(self) -> None:
        """Remove all hooks."""
        self._running = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
