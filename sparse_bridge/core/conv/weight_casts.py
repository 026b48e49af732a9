"""Weights that autocast has cast to fp16 or bf16, for convolutions in training: in one launch for a whole pass.

A network's layers cast their weights one after another, 60 launches in a U-Net. The first convolution behind a
backward pass casts all weights that were cast in the pass before; the layers take those casts when they are
called. A cast serves once, on its stream, and only where the weight is the same tensor at the same address and
version; the next backward pass drops what is left. Values are those of `weight.to(dtype)`. As in torch's own cache
of autocast, a change through `weight.data` between a pass's first convolution and the layer's call goes unseen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ... import state
from ...kernels.runtime.target import capturing, current_stream

_ALIGNMENT = 128  # values between two starts in the common memory: 256 bytes of fp16 or bf16
_MOST_WEIGHTS = 4096  # that are remembered of a pass; a pass that never ends must not grow without bound


class _Made(NamedTuple):
    """A cast that waits for its layer, and the weight as it was then."""

    weight: weakref.ref[torch.Tensor]
    version: int
    address: int
    cast: torch.Tensor


class _Pass:
    """Casts of a forward pass, by id of the weight.  ended: a backward pass has begun since."""

    __slots__ = ("cast", "ended", "waiting")

    def __init__(self) -> None:
        self.cast: dict[int, weakref.ref[torch.Tensor]] = {}
        self.waiting: dict[int, _Made] = {}
        self.ended = False

    def begin(self, device: torch.device, dtype: torch.dtype) -> None:
        """Cast what the pass before has cast, as far as that can share a launch."""
        weights = [w for w in (ref() for ref in self.cast.values()) if w is not None and _may_share(w, device)]
        self.cast.clear()
        self.ended = False
        if len(weights) < 2:
            return
        ends = list(_ends(weights))
        memory = torch.empty(ends[-1], dtype=dtype, device=device)
        casts = [memory.as_strided(w.shape, w.stride(), end - _room(w)) for w, end in zip(weights, ends, strict=True)]
        torch._foreach_copy_(casts, weights)
        for weight, cast in zip(weights, casts, strict=True):
            self.waiting[id(weight)] = _Made(weakref.ref(weight), weight._version, weight.data_ptr(), cast)

    def take(self, weight: torch.Tensor) -> torch.Tensor | None:
        """The cast that waits for a weight, unless the weight has changed."""
        made = self.waiting.pop(id(weight), None)
        if made is not None and made[0]() is weight:
            self.cast[id(weight)] = made[0]
            return made[3] if made[1] == weight._version and made[2] == weight.data_ptr() else None
        if len(self.cast) < _MOST_WEIGHTS:
            self.cast[id(weight)] = weakref.ref(weight)
        return None


_passes: dict[tuple[torch.device, torch.dtype, int], _Pass] = {}  # by device, dtype and stream


def cast_weight(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """weight (any shape, float) in autocast's `dtype`; fp64, and what has it already, as it is."""
    if weight.dtype is dtype or weight.dtype is torch.float64:
        return weight
    device = weight.device
    if not _may_share(weight, device) or torch._C._current_graph_task_id() != -1 or capturing(device):
        return weight.to(dtype)  # a backward pass that computes again casts little; a graph casts at each replay
    key = device, dtype, current_stream(device)
    current = _passes.get(key)
    if current is None:
        current = _passes[key] = _Pass()
    elif current.ended:
        current.begin(device, dtype)
    made = current.take(weight)
    return weight.to(dtype) if made is None else made


def backward_begins() -> None:
    """Weights change behind a backward pass: drop the casts that no layer has taken. Called by each layer's."""
    for current in _passes.values():
        if not current.ended:
            current.ended = True
            current.waiting.clear()


@state.owns
def reset() -> None:
    """Forget which weights were cast."""
    _passes.clear()


def _may_share(weight: torch.Tensor, device: torch.device) -> bool:
    """Whether a weight is a parameter that its user owns as a whole: no attributes of engines that move its memory
    about, memory that is there, rows one after another."""
    return (
        type(weight) is torch.nn.Parameter
        and weight.dtype is torch.float32
        and weight.device == device
        and weight.is_leaf
        and not weight.is_inference()
        and not weight.__dict__
        and weight.is_contiguous()
        and weight.untyped_storage().size() > 0
    )


def _room(weight: torch.Tensor) -> int:
    """Values that a weight takes in the common memory."""
    return -(-weight.numel() // _ALIGNMENT) * _ALIGNMENT


def _ends(weights: list[torch.Tensor]) -> Iterator[int]:
    """Where each weight's room in the common memory ends, in values."""
    end = 0
    for weight in weights:
        end += _room(weight)
        yield end
