"""The sparse tensors of a replayed call, each beside the one of the capture that it is like."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .structures import Tensors


class _Level(NamedTuple):
    """captured: coordinates of the capture.  own: a tensor of the call.  coords: of it, then; version: theirs."""

    captured: torch.Tensor
    own: weakref.ref[Any]
    coords: torch.Tensor
    version: int | None


class Results:
    """The input of a call, and results that the program still has: kernel maps between them, which lie in memory that
    the next replay writes to, can be built again. Results are not kept: their maps hold this.

    captured, x: the inputs.  compute_again: makes such a tensor of the call as one of the capture is, with all its
    maps; it keeps the call, and so `x`."""

    def __init__(self, tensors: Tensors, captured: Any, x: Any, compute_again: Callable[[Any], Any]) -> None:
        self.tensors, self._compute_again = tensors, compute_again
        self._coords = tensors.coordinates_of(x)
        self._version = _version(self._coords)
        self._levels: list[_Level] = []
        self._recovered: dict[int, Any] = {}
        self.add(captured, x)

    def add(self, captured: Any, own: Any) -> None:
        """`own` is of the call what `captured` is of the capture."""
        coords = self.tensors.coordinates_of(own)
        try:
            reference = weakref.ref(own)
        except TypeError:  # a class with slots; its maps are built anew by layers that want them
            return
        self._levels.append(_Level(self.tensors.coordinates_of(captured), reference, coords, _version(coords)))

    def at(self, coords: torch.Tensor, unwritten: bool = False) -> Any:
        """The tensor of the call over the level whose coordinates are these in the capture, or None. It has the
        coordinates that it had then.  unwritten: and nobody has written to these."""
        for level in self._levels:
            found = level.own()
            same = (level.captured.data_ptr(), level.captured.shape) == (coords.data_ptr(), coords.shape)
            if same and found is not None and self.tensors.coordinates_of(found) is level.coords:
                return None if unwritten and level.version != _version(level.coords) else found
        return None

    def recover(self, captured: Any) -> Any:
        """The tensor of the call that is like `captured`, with all its maps: the model computes once more, and is not
        replayed from now on. Raises RuntimeError where the input's coordinates were written to since the call."""
        if self._version != _version(self._coords):
            raise RuntimeError(
                "kernel maps of a result of a replay are asked for, and the coordinates that the model was given have "
                "been modified by an inplace operation; call it in `with sparse_bridge.eager():`, or give it a copy."
            )
        if id(captured) not in self._recovered:
            self._recovered[id(captured)] = self._compute_again(captured)
        return self._recovered[id(captured)]


def _version(coords: torch.Tensor) -> int | None:
    """How often it was written to; None where nobody counts."""
    return None if coords.is_inference() else coords._version
