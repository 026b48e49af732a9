"""Which calls may be replayed, and what a graph is captured for."""

from __future__ import annotations

import itertools
import reprlib
import sys
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ... import memory, settings
from ...refusals import Refusal, Why
from ..conv.convolution import autocast_dtype
from ..device import rocm
from ..device.torch_compat import allows_fp16_sums, allows_tf32
from ..geometry.data_bounds import Root
from . import padded
from .calls.frames import calls_under_way
from .calls.structures import Tensors, own_attributes, traits_of

_data_ptr = torch.Tensor.data_ptr


class GraphKey(NamedTuple):
    """What a graph was captured for, but for its rows.

    label: what else the sparse tensor says of itself; with the box where the model looks at that.
    constants: what else the model is given.  switches: what else layers look at.
    """

    tensors: Tensors
    device: torch.device
    dtype: torch.dtype
    autocast: torch.dtype | None
    channels: int
    label: Hashable
    constants: Hashable
    switches: tuple[Any, ...]


_FIELDS = {
    "tensors": "its framework",
    "device": "its device",
    "dtype": "the dtype of its features",
    "autocast": "the dtype of autocast",
    "channels": "the number of its channels",
    "label": "what its sparse tensor says of itself",
    "constants": "an argument",
    "switches": "a setting, or a mode of a module",
}


def difference(before: Hashable, now: Hashable) -> str:
    """What tells two calls apart first, with both values."""
    name, *values = _difference("the call", before, now)
    return "{} was {}, is {}".format(name, *map(reprlib.repr, values))


def _difference(name: str, before: Any, now: Any) -> tuple[str, Any, Any]:
    if isinstance(before, GraphKey) and isinstance(now, GraphKey):
        names: Sequence[str] = [_FIELDS[field] for field in GraphKey._fields]
    elif type(before) is type(now) is tuple and len(before) == len(now) > 0:
        if before[0] == now[0]:
            name = _named(name, before)
        names = [name] * len(now)
    else:
        return name, before, now
    pairs = zip(names, before, now, strict=True)
    return next((_difference(*pair) for pair in pairs if pair[1] != pair[2]), (name, before, now))


def _named(name: str, part: tuple[Any, ...]) -> str:
    """The name of a part that is preceded by it: an argument, an attribute, a local variable, or a dictionary's entry
    behind the path to that."""
    first = part[0]
    if len(part) == 2 and isinstance(first, str):
        return repr(first)
    if len(part) == 2 and type(first) is int:
        return f"argument {first + 1}"
    return repr(part[1]) if len(part) == 3 and type(first) is tuple and isinstance(part[1], str) else name


def addresses(modules: Sequence[nn.Module]) -> tuple[int, ...]:
    """Where parameters and buffers lie: a graph reads them there."""
    return tuple(map(_data_ptr, tensors_of_modules(modules)))


def tensors_of_modules(modules: Sequence[nn.Module]) -> Iterator[torch.Tensor]:
    """Parameters and buffers of each module in turn."""
    return (
        tensor
        for module in modules
        for tensors in (module._parameters, module._buffers)
        if tensors
        for tensor in tensors.values()
        if tensor is not None
    )


def parameters_of(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Those of each module in turn: as `parameters()` has them, but for shared ones, in a tenth of the time."""
    parameters = itertools.chain.from_iterable([m._parameters.values() for m in modules])
    return [p for p in parameters if p is not None]


def root_of(tensors: Tensors, x: Any, features: torch.Tensor | None, owner: Any = None) -> Root | Why:
    """The coordinates of a sparse tensor with these features as the core has them, in their box; or why calls with it
    may not be captured. owner: of the graphs that may serve it, if there is one."""
    if features is None or features.ndim != 2:
        return Why.GRAPH_FEATURES
    why = why_not_capturable(features)
    if why is not None:
        return why
    root: Root | None = tensors.capture_root(x)
    if root is None:
        return Why.GRAPH_HAS_MAPS if tensors.coordinates_of(x).dtype == torch.int32 else Why.GRAPH_COORDINATES
    coords = root.coords
    columns = (coords.device, coords.dtype, coords.ndim, coords.shape[-1])
    if columns != (features.device, torch.int32, 2, 1 + root.bounds.dimension):
        return Why.GRAPH_COORDINATES
    if not 0 < features.shape[0] == coords.shape[0]:
        return Why.GRAPH_ROWS
    if root.limit is None or owner is None or not (graphs := owner.graphs):
        return root
    return root.for_steps(any(graph.maps.makes_levels for graph in graphs))


def key_of(tensors: Tensors, x: Any, features: torch.Tensor, constants: Hashable) -> GraphKey:
    """What would have to be captured for a call with this sparse tensor. constants: what else counts."""
    return GraphKey(
        tensors,
        features.device,
        features.dtype,
        autocast_dtype(features.device),
        features.shape[1],
        tensors.label(x),
        constants,
        (*_asked_of(x, features), settings.get(), tensors.switches(), allows_tf32(), allows_fp16_sums()),
    )


def _asked_of(x: Any, features: torch.Tensor) -> tuple[Any, ...]:
    """What a program may ask of a sparse tensor and its features besides their values; hashable."""
    return type(x), frozenset(own_attributes(x)), *traits_of(features)


def why_not_capturable(features: torch.Tensor) -> Why | None:
    """Why launches over these features cannot be captured now; None where they can."""
    if not features.is_cuda:
        return Why.GRAPH_DEVICE
    if not rocm.replays_graphs():
        rocm.say_that_graphs_stay_off()
        return Why.GRAPH_ROCM
    if memory.limit is not None:
        return Why.GRAPH_MEMORY
    if torch.cuda.is_current_stream_capturing() or padded.current() is not None:
        return Why.GRAPH_NESTED
    return None


def assert_on_one_rank(modules: Sequence[nn.Module]) -> None:
    """Raise Refusal where one of a model's modules, whose call is under way, waits for other ranks, or where FSDP
    shards parameters around it: a trial and a capture call the model on one rank alone."""
    for module in modules:
        if isinstance(module, nn.SyncBatchNorm) and module.training and _several():
            raise Refusal(Why.GRAPH_RANKS, type(module).__name__)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharding = tuple(getattr(fsdp, name) for name in ("FullyShardedDataParallel", "FSDPModule") if hasattr(fsdp, name))
    for module, _ in calls_under_way(sys._getframe()):
        if isinstance(module, sharding):
            raise Refusal(Why.GRAPH_RANKS, type(module).__name__)


def _several() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
