"""The levels of a replayed call, each beside the one of the capture that it is like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...maps.map_cache import version_of
from .structures import Tensors


class _Level(NamedTuple):
    """captured: coordinates of the capture.  own: a tensor of the call without features and maps.  version: of its
    coordinates, then."""

    captured: torch.Tensor
    own: Any
    version: int


class Results:
    """The input of a call, and the levels of its results: kernel maps between them, which lie in memory that the next
    replay writes to, can be built again. Their maps hold this. It holds no maps and no object of the program's, which
    would then wait for the garbage collector.

    captured, x: the inputs.  compute_again: makes of such an `x` the tensor of the call that is like one of the
    capture, with all its maps."""

    def __init__(self, tensors: Tensors, captured: Any, x: Any, compute_again: Callable[[Any, Any], Any]) -> None:
        self.tensors, self._compute_again = tensors, compute_again
        features = tensors.features_of(x)
        assert features is not None
        self._x = tensors.apart(x, features.detach())
        self._levels: list[_Level] = []
        self._recovered: dict[int, Any] = {}
        self.add(captured, x)

    def add(self, captured: Any, own: Any) -> None:
        """`own` is of the call what `captured` is of the capture."""
        features, coords = self.tensors.features_of(own), self.tensors.coordinates_of(own)
        assert features is not None
        level = self.tensors.apart(own, features.new_empty((len(coords), 0)))
        self._levels.append(_Level(self.tensors.coordinates_of(captured), level, version_of(coords)))

    def at(self, coords: torch.Tensor, unwritten: bool = False) -> Any:
        """A tensor over the level of the call whose coordinates are these in the capture, or None.  unwritten: and
        nobody has written to its coordinates."""
        for level in self._levels:
            if (level.captured.data_ptr(), level.captured.shape) == (coords.data_ptr(), coords.shape):
                written = level.version != version_of(self.tensors.coordinates_of(level.own))
                return None if unwritten and written else level.own
        return None

    def recover(self, captured: Any) -> Any:
        """The tensor of the call that is like `captured`, with all its maps: the model computes once more, and is not
        replayed from now on. Raises RuntimeError where the input's coordinates were written to since the call."""
        if self._levels[0].version != version_of(self.tensors.coordinates_of(self._x)):
            raise RuntimeError(
                "kernel maps of a result of a replay are asked for, and the coordinates that the model was given have "
                "been modified by an inplace operation; call it in `with sparse_bridge.eager():`, or give it a copy."
            )
        if id(captured) not in self._recovered:
            self._recovered[id(captured)] = self._compute_again(self._x, captured)
        return self._recovered[id(captured)]
