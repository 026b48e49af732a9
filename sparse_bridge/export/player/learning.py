"""What a network asks of its input, learnt on the host: the maps, how levels grow, and what follows each
layer. Nothing is launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ...core.capture.recording import Recording
from ...core.device import selection
from ...core.maps import request as requests
from ...core.maps.coordinate_map import CoordinateMap
from ...core.maps.map_cache import MapStore
from ...core.maps.request import BuiltMap, MapRequest
from ...kernels.runtime import precompile
from ..plugin_checks import ExportError

_NUMBERS = frozenset({"add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "rsub", "pow"})
_MAPS = ("submanifold", "strided", "generative", "between")


class _Learner:
    """Answers requests for maps as the host builds them, and records them."""

    def __init__(self) -> None:
        self.recording: Recording | None = None

    def __call__(self, store: MapStore, cmap: CoordinateMap, req: MapRequest) -> BuiltMap:
        if req.map_type not in _MAPS:
            raise ExportError(f"the model asks for a map of the kind {req.map_type!r}, which GPU packages do not hold.")
        recording = store.recording
        if recording is None:
            if self.recording is not None:
                raise ExportError("the model makes sparse tensors of several inputs; GPU packages take one.")
            recording = store.recording = self.recording = Recording(cmap.n_rows)
            recording.levels[cmap], recording.box = 0, cmap.box
        n_steps = len(recording.steps)
        with selection.maps_by_host(), _disable_current_modes():
            built: BuiltMap = recording.ask(cmap, req)
        if len(recording.steps) == n_steps:
            raise ExportError("the model asks for maps between coordinates that are not of one input.")
        rulebook = built.kmap.rulebook
        rulebook.observe(None)
        with _disable_current_modes():
            for side in (0, 1):  # known now: what kernels would make of them later has no values
                rulebook.table(side)
        rulebook.observe(recording.views[n_steps])
        if built.store is not None:
            built.store.recording = recording
        return built


class _Numbers(TorchDispatchMode):
    """The numbers that a model computes with, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[float, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _NUMBERS:
            self.seen.append((name, tuple(arg for arg in args if isinstance(arg, (int, float)))))
        return func(*args, **(kwargs or {}))


def learn(model: nn.Module, features: torch.Tensor, coords: torch.Tensor) -> Recording:
    """The requests of a model over an input, in a program in which tensors of the host stand for those of a GPU.

    features: [N, C] float; coords: int32 [N, 1 + D], distinct and inside of the grid.
    Raises: ExportError for what no package holds.
    """
    previous, numbers, steps = requests.registered(), [], []
    n_rows = len(coords)
    try:
        for rows in (n_rows, max(1, n_rows // 2), n_rows):  # three calls, until layers know what follows them
            learner = _Learner()
            requests.register(learner)
            with precompile.dry_run(), _Numbers() as seen:
                # Maps are kept by the coordinates' object.
                model(features[:rows].clone(), coords[:rows].clone())
            numbers.append(seen.seen)
            steps.append([] if learner.recording is None else learner.recording.steps)
    finally:
        requests.register(*previous)
    if steps[1] != steps[2]:
        raise ExportError("the model asks for other maps over fewer rows; expected the same over every input.")
    if numbers[1] != numbers[2]:
        changed = [pair for pair in zip(*numbers[1:], strict=False) if pair[0] != pair[1]]
        raise ExportError(
            f"the model computes with other numbers over other rows ({_listed(changed)}); how many rows there are is "
            "known on the GPU alone. Leave that to the program that plays the package."
        )
    if learner.recording is None or learner.recording.box is None:
        raise ExportError("the model has no sparse layer that asks for a map of its input.")
    return learner.recording


def _listed(changed: Sequence[tuple[Any, Any]]) -> str:
    if not changed:
        return "there are more of them"
    (name, one), (_, other) = changed[0]
    return f"{name} of {', '.join(map(str, one))} and of {', '.join(map(str, other))}"


def rows_of_levels(recording: Recording, rows: int) -> dict[int, int]:
    """Rows that levels have over inputs of so many rows, about."""
    grown = {index + 1: rows * count // max(1, recording.n_rows) for index, count in recording.rows.items()}
    return {0: rows, **{level: max(1, count) for level, count in grown.items()}}


def inputs_of(inputs: Sequence[torch.Tensor]) -> tuple[int, int]:
    """(which input holds the features, which one the coordinates). Raises ExportError."""
    floats = [i for i, value in enumerate(inputs) if value.is_floating_point() and value.ndim == 2]
    whole = [i for i, value in enumerate(inputs) if value.dtype == torch.int32 and value.ndim == 2]
    if len(inputs) != 2 or len(floats) != 1 or len(whole) != 1 or len(inputs[0]) != len(inputs[1]):
        described = ", ".join(f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in inputs)
        raise ExportError(
            f"the model's inputs are {described}; a GPU package takes features [N, C] and int32 coordinates "
            "[N, 1 + D] of the same rows."
        )
    return floats[0], whole[0]
