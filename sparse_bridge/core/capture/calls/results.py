"""The sparse tensors of a replayed call, each beside the one of the capture that it is like."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from .structures import Tensors


class Results:
    """The input of a call, and results that the program still has: kernel maps between them, which lie in memory that
    the next replay writes to, can be built again. Results are not kept: their maps hold this.

    captured, x: the inputs.  compute_again: makes such a tensor of the call as one of the capture is, with all its
    maps."""

    def __init__(self, tensors: Tensors, captured: Any, x: Any, compute_again: Callable[[Any], Any]) -> None:
        self.tensors, self._x, self._compute_again = tensors, x, compute_again
        self._levels: list[tuple[torch.Tensor, weakref.ref[Any], int | None]] = []
        self._recovered: dict[int, Any] = {}
        self.add(captured, x)

    def add(self, captured: Any, own: Any) -> None:
        """`own` is of the call what `captured` is of the capture."""
        coords = self.tensors.coordinates_of(own)
        version = None if coords.is_inference() else coords._version
        self._levels.append((self.tensors.coordinates_of(captured), weakref.ref(own), version))

    def at(self, coords: torch.Tensor) -> Any:
        """The tensor of the call over the level whose coordinates are these in the capture, or None."""
        for mine, own, _ in self._levels:
            found = own()
            if found is not None and (mine.data_ptr(), mine.shape) == (coords.data_ptr(), coords.shape):
                return found
        return None

    def check(self) -> None:
        """Raise RuntimeError where coordinates were written to since the call."""
        for _, reference, version in self._levels:
            own = reference()
            if own is not None and version is not None and version != self.tensors.coordinates_of(own)._version:
                raise RuntimeError(
                    "kernel maps of a result of a replay are asked for, and coordinates of the call have been modified "
                    "by an inplace operation; call the model in `with sparse_bridge.eager():`, or give it a copy."
                )

    def recover(self, captured: Any) -> Any:
        """The tensor of the call that is like `captured`, with all its maps: the model computes once more, and is not
        replayed from now on."""
        self.check()
        if id(captured) not in self._recovered:
            self._recovered[id(captured)] = self._compute_again(captured)
        return self._recovered[id(captured)]
