"""What captured models have in common: which calls may be replayed, and the graphs so far."""

from __future__ import annotations

import abc
import collections
import contextlib
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from ... import log, settings
from ..conv.convolution import autocast_dtype
from ..device.serving import kernel_target
from ..geometry.boxes import Box
from . import padded, prefetch
from .captured_maps import CapturedMaps, padded_input
from .padded import PaddedInput, UnpaddedError

_EAGER_CALLS = 2  # of a size before it is captured
_FAILURES = 3  # until a model is left alone


class Tensors(Protocol):
    """How the sparse tensors of one framework are read and made anew."""

    def is_tensor(self, value: Any) -> bool:
        """Whether `value` is a sparse tensor of the framework."""

    def features_of(self, x: Any) -> torch.Tensor | None:
        """Features [N, C]."""

    def coordinates_of(self, x: Any) -> torch.Tensor:
        """Coordinates, batch first where a model may be captured: int32 [N, 1 + D]."""

    def with_rows(self, x: Any, features: torch.Tensor, coords: torch.Tensor) -> Any:
        """A sparse tensor like `x` with other rows, hence without kernel maps."""

    def capture_box(self, x: Any) -> Box | None:
        """The cells that `x` may occupy; None where a model over `x` may not be captured."""

    def switches(self) -> Hashable:
        """What layers look at besides their arguments."""


class Kind(NamedTuple):
    """What a graph was captured for.

    capacity: rows of the padded input.  switches: what else layers look at.
    """

    tensors: Tensors
    device: torch.device
    dtype: torch.dtype
    autocast: torch.dtype | None
    channels: int
    box: Box
    capacity: int
    switches: tuple[Any, ...]


def addresses(modules: Sequence[nn.Module]) -> tuple[int, ...]:
    """Where parameters and buffers lie: a graph reads them there."""
    return tuple([
        tensor.data_ptr()
        for module in modules
        for held in (module._parameters, module._buffers)
        for tensor in held.values() if tensor is not None
    ])  # fmt: skip


def kind_of(tensors: Tensors | None, x: Any) -> Kind | None:
    """What would have to be captured for `x`; None where it may not be."""
    if tensors is None or not tensors.is_tensor(x):
        return None
    features, coords = tensors.features_of(x), tensors.coordinates_of(x)
    box = tensors.capture_box(x) if features is not None and capturable(features) else None
    if features is None or box is None:
        return None
    columns = (coords.device, coords.dtype, coords.ndim, coords.shape[-1])
    if columns != (features.device, torch.int32, 2, len(box.size)):
        return None
    if features.ndim != 2 or not 0 < features.shape[0] == coords.shape[0]:
        return None
    return Kind(
        tensors, features.device, features.dtype, autocast_dtype(features.device),
        features.shape[1], box, padded.capacity_of(features.shape[0]),
        (settings.get(), tensors.switches(), torch.backends.cuda.matmul.allow_tf32),
    )  # fmt: skip


def capturable(features: torch.Tensor) -> bool:
    """Whether launches over these features can be captured now; not inside another model that is
    being captured."""
    return (
        features.is_cuda
        and not torch.cuda.is_current_stream_capturing()
        and padded.current() is None
    )


def maps_like(
    x: Any, kind: Kind, pool: Any, training: bool = False
) -> tuple[CapturedMaps, dict[int, int]] | None:
    """(captured maps, built for `x`; the rows of its levels); None where inputs of its grid are not
    asked the same, or this one is not like the others."""
    record = prefetch.history_of(kind.device, kind.box, training)
    target = kernel_target(kind.device)
    if record is None or target is None:
        return None
    coords = kind.tensors.coordinates_of(x)
    scene = padded_input(coords, kind.capacity, record)
    steps, n_rows = tuple(record.steps), coords.shape[0]
    maps = CapturedMaps(scene, kind.box, target, steps, pool, n_rows, distinct=True)
    maps.start(coords)
    rows = maps.rows(n_rows)
    return None if rows is None else (maps, rows)


class Replays(abc.ABC):
    """The graphs of a model, by what they were captured for, and when to capture another.

    forward: the model's own.  tensors_of: the framework of a sparse tensor, None for other objects.
    most: graphs, of which each holds memory.
    """

    most: int
    is_optimized_forward = True

    def __init__(
        self, model: nn.Module, forward: Callable[..., Any],
        tensors_of: Callable[[Any], Tensors | None],
    ) -> None:  # fmt: skip
        self.model, self.forward, self.tensors_of = model, forward, tensors_of
        self._forget()

    def _forget(self) -> None:
        self.modules: list[nn.Module] = []  # of the model, once it is called
        self.graphs: dict[Kind, Any] = {}
        self.calls: dict[Kind, int] = {}
        self.failures = 0
        self.pool: Any = None
        self.stream: torch.cuda.Stream | None = None  # of the last replay
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles of a model begin anew."""
        mine = {"model", "forward", "tensors_of", *self._carried}
        return {name: value for name, value in self.__dict__.items() if name in mine}

    _carried: tuple[str, ...] = ()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.modules = self.modules or list(self.model.modules())
        kind = self._kind(*args) if len(args) == 1 and not kwargs else None
        return self.forward(*args, **kwargs) if kind is None else self._serve(kind, *args)

    @abc.abstractmethod
    def _kind(self, x: Any) -> Kind | None:
        """What would have to be captured for `x`; None where it may not be."""

    @abc.abstractmethod
    def _serve(self, kind: Kind, x: Any) -> Any:
        """The model's output, replayed where a graph can."""

    def held(self, kind: Kind) -> Any:
        """The graph for `kind`, unless what it reads has moved."""
        graph = self.graphs.get(kind)
        if graph is not None and graph.parameters != addresses(self.modules):
            self.graphs.clear()
            self.calls.clear()
            return None
        return graph

    def follow(self) -> None:
        """All graphs of a model share their memory: the current stream goes on where the last
        replay was queued."""
        stream = torch.cuda.current_stream()
        if self.stream is not None and stream != self.stream:
            stream.wait_stream(self.stream)
        self.stream = stream

    def consider(self, kind: Kind, capture: Callable[[], Any]) -> None:
        """Capture a graph where scenes of this size keep coming. capture: returns it, or None for
        this time."""
        calls = self.calls[kind] = self.calls.get(kind, 0) + 1
        late = calls - _EAGER_CALLS
        if late <= 0 or late & (late - 1):  # less and less often
            return
        if self.failures >= _FAILURES or len(self.graphs) >= self.most or kind in self.graphs:
            return
        try:
            with self.lock, torch.cuda.device(kind.device):
                if not self.graphs:  # a pool lasts as long as its graphs
                    self.pool = torch.cuda.graph_pool_handle()
                graph = capture()
                if graph is not None:
                    self.graphs[kind] = graph
                    torch.cuda.empty_cache()  # what the trial took on a stream of its own
        # A model may do anything at all in there; it runs as it did.
        except Exception as error:
            self.failures += 1
            log.once(
                ("replay", type(self).__name__, type(self.model).__name__),
                f"{type(self.model).__name__} is not replayed from a graph: {error}",
                level=30,
            )


def rebuilt(tensors: Tensors, value: Any, cut: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A model's output with `cut` of every tensor, in its own structure. Sparse tensors lose their
    maps. Raises UnpaddedError."""
    if isinstance(value, torch.Tensor):
        return cut(value)
    if tensors.is_tensor(value):
        features = cut(tensors.features_of(value))  # type: ignore[arg-type]
        return tensors.with_rows(value, features, cut(tensors.coordinates_of(value)))
    if type(value) in (dict, collections.OrderedDict):
        return type(value)((name, rebuilt(tensors, one, cut)) for name, one in value.items())
    if isinstance(value, (list, tuple)):
        parts = [rebuilt(tensors, one, cut) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UnpaddedError(
        f"its output holds a {type(value).__name__}; expected sparse tensors, their features, "
        "numbers and text, in lists, tuples and dicts."
    )


def cutter(
    scene: PaddedInput, rows: dict[int, int], own: torch.Tensor
) -> Callable[[torch.Tensor], torch.Tensor]:
    """What cuts a tensor of a padded scene to copies of the rows that there are; the scene's own
    coordinates are `own`."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        level = scene.level_of(tensor)
        if level == 0 and tensor.data_ptr() == scene.coords.data_ptr():
            return own
        return tensor[: rows[level]].clone()

    return cut


def over_padded(
    forward: Callable[[Any], Any], scene: PaddedInput, features: torch.Tensor, x: Any,
    tensors: Tensors,
) -> Any:  # fmt: skip
    """A model over a padded scene that is otherwise like `x`."""
    # Coordinates in an object of their own, which has no maps yet.
    twin = tensors.with_rows(x, features, scene.coords.detach())
    with padded.using(scene), _uncached_autocast(features.device):
        return forward(twin)


def _uncached_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The autocast in force, without the casts of weights that it keeps and soon lets go of."""
    dtype = autocast_dtype(device)
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype, cache_enabled=False)
