"""Which calls may be replayed, and what a graph is captured for."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ... import memory, settings
from ..conv.convolution import autocast_dtype
from ..device import rocm
from ..geometry.data_bounds import Root
from . import padded
from .calls.call import Call
from .captured_model import Tensors

_data_ptr = torch.Tensor.data_ptr


class Kind(NamedTuple):
    """What a graph was captured for.

    wide: whether keys of the coordinates take 64 bits.  label: what else the sparse tensor says of
    itself; with the box where the model looks at that.  capacity: rows of the padded input.
    constants: what else the model is given.  switches: what else layers look at.
    """

    tensors: Tensors
    device: torch.device
    dtype: torch.dtype
    autocast: torch.dtype | None
    channels: int
    wide: bool
    label: Hashable
    capacity: int
    constants: Hashable
    switches: tuple[Any, ...]


def addresses(modules: Sequence[nn.Module]) -> tuple[int, ...]:
    """Where parameters and buffers lie: a graph reads them there."""
    return tuple(
        [
            _data_ptr(tensor)
            for module in modules
            for held in (module._parameters, module._buffers)
            if held
            for tensor in held.values()
            if tensor is not None
        ]
    )


def root_of(tensors: Tensors, x: Any) -> Root | None:
    """The coordinates of a sparse tensor as the core has them, in their box; None where calls with
    it may not be captured."""
    features = tensors.features_of(x)
    if features is None or features.ndim != 2 or not capturable(features):
        return None
    root = tensors.capture_root(x)
    if root is None:
        return None
    coords = root.coords
    columns = (coords.device, coords.dtype, coords.ndim, coords.shape[-1])
    if columns != (features.device, torch.int32, 2, 1 + root.bounds.dimension):
        return None
    return root if 0 < features.shape[0] == coords.shape[0] else None


def kind_of(tensors: Tensors, call: Call, root: Root) -> Kind:
    """What would have to be captured for a call over these coordinates."""
    features = tensors.features_of(call.x)
    assert features is not None  # `root_of` has seen them
    return Kind(
        tensors,
        features.device,
        features.dtype,
        autocast_dtype(features.device),
        features.shape[1],
        root.box.key64,
        tensors.label(call.x),
        padded.capacity_of(features.shape[0]),
        call.constants,
        (settings.get(), tensors.switches(), torch.backends.cuda.matmul.allow_tf32),
    )


def capturable(features: torch.Tensor) -> bool:
    """Whether launches over these features can be captured now; not inside another model that is
    being captured, nor under a limit on memory, of which graphs have their own."""
    if features.is_cuda and not rocm.replays_graphs():
        rocm.say_that_graphs_stay_off()
        return False
    return (
        features.is_cuda
        and memory.limit is None
        and not torch.cuda.is_current_stream_capturing()
        and padded.current() is None
    )
