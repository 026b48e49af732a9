"""What a network asks of its input, learnt on the host: the maps, how levels grow, and what follows each
layer. Nothing is launched."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ...core.capture.recording import Recording
from ...core.device import selection
from ...core.maps import request as requests
from ...core.maps.coordinate_map import CoordinateMap
from ...core.maps.map_cache import MapStore
from ...core.maps.request import BuiltMap, MapRequest
from ...kernels.runtime import precompile
from ..plugin_checks import ExportError

_CALLS = 3  # until layers know what follows them
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
        with selection.standing_in(False):
            built: BuiltMap = recording.ask(cmap, req)
        if len(recording.steps) == n_steps:
            raise ExportError("the model asks for maps between coordinates that are not of one input.")
        rulebook = built.kmap.rulebook
        rulebook.observe(None)
        for side in (0, 1):  # known now: what kernels would make of them later has no values
            rulebook.table(side)
        rulebook.observe(recording.views[n_steps])
        if built.store is not None:
            built.store.recording = recording
        return built


def learn(model: nn.Module, features: torch.Tensor, coords: torch.Tensor) -> Recording:
    """The requests of a model over an input, in a program in which tensors of the host stand for those of a GPU.

    features: [N, C] float; coords: int32 [N, 1 + D], distinct and inside of the grid.
    Raises: ExportError for what no package holds.
    """
    previous = requests.registered()
    try:
        for _ in range(_CALLS):
            learner = _Learner()
            requests.register(learner)
            with precompile.dry_run():
                # Maps are kept by the coordinates' object.
                model(features.clone(), coords.clone())
    finally:
        requests.register(*previous)
    if learner.recording is None or learner.recording.box is None:
        raise ExportError("the model has no sparse layer that asks for a map of its input.")
    return learner.recording


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
