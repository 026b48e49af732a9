"""Whole models as one captured graph of launches: inference without a line of Python.

A model whose maps are built ahead runs the same launches for every scene of about the same size, so
they are captured once (CUDA graphs; HIP has the same) over a scene with room to spare, see
`core.padded`, and replayed: features and coordinates are copied in, results cut to size and copied
out. Before a graph is trusted, the model runs over the padded scene with NaN in every row that does
not exist and has to agree with what it computes ordinarily.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from ... import log, settings
from ...core import ahead, padded
from ...core.conv import autocast_dtype
from ...core.padded import PaddedScene, UnpaddedError
from .. import fusion
from .layers import allow_tf32, box_of

__all__ = ["Replayer"]

_EAGER_CALLS = 2  # of a size before it is captured
_GRAPHS = 6  # of one model; each holds the memory of an inference
_FAILURES = 3  # until a model is left alone


class _Kind(NamedTuple):
    """What a graph was captured for; switches: what else layers look at."""

    device: torch.device
    dtype: torch.dtype
    autocast: torch.dtype | None
    channels: int
    shape: tuple[int, ...]
    batch_size: int
    room: int
    switches: tuple[Any, ...]


@dataclasses.dataclass(eq=False)
class _Graph:
    """One captured inference."""

    graph: Any
    scene: PaddedScene
    features: torch.Tensor
    output: Any
    parameters: tuple[int, ...]

    def run(self, x: Any) -> Any:
        """The model's output for `x`; None where the graph cannot serve it."""
        n_rows = x.features.shape[0]
        _fill(self.scene, self.features, x)
        self.graph.replay()
        rows = self.scene.rows(n_rows)
        return None if rows is None else _cut(self.output, self.scene, rows, x)


def _fill(scene: PaddedScene, features: torch.Tensor, x: Any) -> None:
    n_rows = x.features.shape[0]
    features[:n_rows].copy_(x.features)
    scene.coords[:n_rows].copy_(x.indices)
    scene.count.fill_(n_rows - 1)


def _cut(value: Any, scene: PaddedScene, rows: dict[int, int], x: Any) -> Any:
    """Copies of the rows that there are, in the model's own structure."""
    if isinstance(value, torch.Tensor):
        return value[: rows[_level(value, scene)]].clone()
    if hasattr(value, "indice_dict"):
        level = _level(value.indices, scene)
        out = value.replace_feature(_cut(value.features, scene, rows, x))
        out.indices = x.indices if level == 0 else value.indices[: rows[level]].clone()
        out.indice_dict = {}
        return out
    if type(value) in (dict, collections.OrderedDict):
        return type(value)((name, _cut(one, scene, rows, x)) for name, one in value.items())
    if isinstance(value, (list, tuple)):
        parts = [_cut(one, scene, rows, x) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UnpaddedError(
        f"its output holds a {type(value).__name__}; expected sparse tensors, their features, "
        "numbers and text, in lists, tuples and dicts."
    )


def _level(value: torch.Tensor, scene: PaddedScene) -> int:
    for level, room in scene.rooms.items():
        if value.ndim and value.shape[0] == room:
            return level
    raise UnpaddedError(
        f"its output holds a tensor of shape {list(value.shape)}; expected a row for every site."
    )


class Replayer:
    """The forward of a model in evaluation.

    forward: the model's own.  agree: whether two outputs are equal within rounding.
    """

    def __init__(
        self, model: nn.Module, forward: Callable[..., Any], agree: Callable[[Any, Any], bool]
    ) -> None:
        self.model, self.forward, self.agree = model, forward, agree
        self._forget()

    def _forget(self) -> None:
        self.modules: list[nn.Module] = []  # of the model, once it is called
        self.graphs: dict[_Kind, _Graph] = {}
        self.calls: dict[_Kind, int] = {}
        self.failures = 0
        self.pool: Any = None
        self.stream: torch.cuda.Stream | None = None  # of the last replay
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles of a model begin anew."""
        return {"model": self.model, "forward": self.forward, "agree": self.agree}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.modules = self.modules or list(self.model.modules())
        kind = self._kind(*args) if len(args) == 1 and not kwargs else None
        if kind is None:
            return self.forward(*args, **kwargs)
        (x,) = args
        graph = self.graphs.get(kind)
        if graph is not None and graph.parameters != self._addresses():
            graph = None
            self.graphs.clear()
            self.pool = None
        out = None if graph is None else self._run(graph, x)
        if out is not None:
            return out
        out = self.forward(x)
        if graph is None:
            self._consider(kind, x, out)
        return out

    def _run(self, graph: _Graph, x: Any) -> Any:
        """One at a time: all graphs of a model share their memory."""
        with self.lock, torch.cuda.device(x.features.device):
            stream = torch.cuda.current_stream()
            if self.stream is not None and stream != self.stream:
                stream.wait_stream(self.stream)
            self.stream = stream
            return graph.run(x)

    def _kind(self, x: Any) -> _Kind | None:
        """What would have to be captured for `x`; None where it may not be."""
        features, indices = getattr(x, "features", None), getattr(x, "indices", None)
        if not isinstance(features, torch.Tensor) or not isinstance(indices, torch.Tensor):
            return None
        if not features.is_cuda or not hasattr(x, "indice_dict") or x.indice_dict or x.benchmark:
            return None
        columns = (indices.device, indices.dtype, indices.ndim, indices.shape[-1])
        if columns != (features.device, torch.int32, 2, 1 + len(x.spatial_shape)):
            return None
        if features.ndim != 2 or not 0 < features.shape[0] == indices.shape[0]:
            return None
        if not fusion.allowed() or torch.cuda.is_current_stream_capturing():
            return None
        if padded.active and padded.current() is not None:
            return None  # inside another model that is being captured
        if any(m.training or m._forward_hooks or m._forward_pre_hooks for m in self.modules):
            return None
        return _Kind(
            features.device, features.dtype, autocast_dtype(features.device), features.shape[1],
            tuple(x.spatial_shape), int(x.batch_size), padded.room_for(features.shape[0]),
            (settings.get(), allow_tf32(), torch.backends.cuda.matmul.allow_tf32),
        )  # fmt: skip

    def _addresses(self) -> tuple[int, ...]:
        """Where parameters and buffers lie: a graph reads them there."""
        return tuple([
            tensor.data_ptr()
            for module in self.modules
            for held in (module._parameters, module._buffers)
            for tensor in held.values() if tensor is not None
        ])  # fmt: skip

    def _consider(self, kind: _Kind, x: Any, out: Any) -> None:
        """Capture a graph where scenes of this size keep coming."""
        calls = self.calls[kind] = self.calls.get(kind, 0) + 1
        if calls <= _EAGER_CALLS or self.failures >= _FAILURES or len(self.graphs) >= _GRAPHS:
            return
        if kind in self.graphs:
            return
        record = ahead.habit_of(kind.device, box_of(x))
        if record is None:
            return
        try:
            with self.lock, torch.cuda.device(kind.device):
                graph = self._capture(kind, x, out, record)
                if graph is not None:
                    self.graphs[kind] = graph
        # A model may do anything at all in there; it runs as it did.
        except Exception as error:
            self.failures += 1
            log.once(
                ("replay", type(self.model).__name__),
                f"{type(self.model).__name__} is not replayed from a graph: {error}",
                level=30,
            )

    def _capture(self, kind: _Kind, x: Any, out: Any, record: Any) -> _Graph | None:
        features = x.features.new_full((kind.room, kind.channels), float("nan"))
        coords = x.indices.new_zeros((kind.room, x.indices.shape[1]))
        count = coords.new_zeros(1)
        trial = PaddedScene(coords, count, record, poison=True)
        _fill(trial, features, x)
        side = torch.cuda.Stream(kind.device)
        side.wait_stream(torch.cuda.current_stream(kind.device))
        with torch.cuda.stream(side):
            found = self._padded(trial, features, x)
            rows = trial.rows(x.features.shape[0])
        if rows is None:
            return None  # this scene is not like the others
        if not self.agree(out, _cut(found, trial, rows, x)):
            raise UnpaddedError("it mixes rows outside its sparse layers.")
        del found
        torch.cuda.current_stream(kind.device).wait_stream(side)
        scene, graph = PaddedScene(coords, count, record), torch.cuda.CUDAGraph()
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            output = self._padded(scene, features, x)
        _cut(output, scene, rows, x)  # raises where it cannot
        return _Graph(graph, scene, features, output, self._addresses())

    def _padded(self, scene: PaddedScene, features: torch.Tensor, x: Any) -> Any:
        """The model over a padded scene."""
        twin = x.replace_feature(features)
        twin.indices = scene.coords.detach()  # an object of its own, which has no maps yet
        twin.indice_dict = {}
        with padded.using(scene), _uncached_autocast(features.device):
            return self.forward(twin)


def _uncached_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The autocast in force, without the casts of weights that it keeps and soon lets go of."""
    dtype = autocast_dtype(device)
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype, cache_enabled=False)
