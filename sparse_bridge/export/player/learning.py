"""What a network asks of its input, learnt on the host: the maps, how levels grow, and what follows each
layer. Nothing is launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ...core.device import selection
from ...core.maps import request as requests
from ...core.maps.coordinate_map import CoordinateMap
from ...core.maps.map_cache import MapStore
from ...core.maps.request import BuiltMap, MapRequest
from ...core.prefetch.recording import Recording
from ...kernels.runtime import precompile
from ..plugin_checks import ExportError
from .entry import Entry

_NUMBERS = frozenset(
    {"add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "rsub", "pow", "linspace", "logspace"}
)
_FEW = 16  # values of a tensor that is made of numbers
_MAPS = ("submanifold", "strided", "generative", "between")


class LayerError(ExportError):
    """A layer asks for what no package holds; the sentence begins behind its name."""


class _Learner:
    """Answers requests for maps as the host builds them, and records them."""

    def __init__(self) -> None:
        self.recording: Recording | None = None
        self.unbounded = False

    def __call__(self, store: MapStore, cmap: CoordinateMap, req: MapRequest) -> BuiltMap:
        if req.map_type not in _MAPS:
            raise LayerError(f"asks for a map of the kind {req.map_type!r}, which GPU packages do not hold.")
        recording = store.recording
        if recording is None:
            if self.recording is not None:
                raise LayerError("asks for a map of other coordinates than the input's; GPU packages take one input.")
            recording = store.recording = self.recording = Recording(cmap.n_rows)
            recording.levels[cmap], recording.box = 0, cmap.box
            self.unbounded = cmap.data_bounds is not None
        n_steps = len(recording.steps)
        with selection.maps_by_host(), _disable_current_modes():
            built: BuiltMap = recording.request(cmap, req)
        if len(recording.steps) == n_steps:
            raise LayerError("asks for a map of coordinates that no layer before it made of the input.")
        rulebook = built.kmap.rulebook
        rulebook.observe(None)
        with _disable_current_modes():
            for side in (0, 1):  # known now: what kernels would make of them later has no values
                rulebook.table(side)
        rulebook.keeps_tables = True
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
        numbers = [arg for arg in args if isinstance(arg, (int, float))]
        if name in _NUMBERS:
            self.seen.append((name, tuple(numbers)))
        elif name == "arange" and len(numbers) > 2:  # how many there are is its result's shape
            self.seen.append((name, (numbers[0], numbers[2])))
        elif name in ("full", "new_full", "full_like", "fill_"):
            self.seen.append((name, tuple(numbers[-1:])))
        elif name == "lift_fresh" and args[0].numel() <= _FEW:
            self.seen.append(("tensor", tuple(args[0].flatten().tolist())))
        if name == "convolution":  # over a dense grid, whose values mean nothing here
            like = func(*pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), args))
            return torch.zeros(like.shape, dtype=like.dtype)
        return func(*args, **(kwargs or {}))


def learn(entry: Entry) -> tuple[Recording, bool]:
    """(the requests of a model over its example, whether the bounds of its coordinates are those of the data), in a
    program in which tensors of the host stand for those of a GPU.

    Raises: ExportError for what no package holds; of one layer LayerError.
    """
    previous, numbers, steps = requests.registered(), [], []
    n_rows = len(entry.coords)
    try:
        for rows in (n_rows, max(1, n_rows // 2), n_rows):  # three calls, until layers know what follows them
            learner = _Learner()
            requests.register(learner)
            with precompile.dry_run(), _Numbers() as seen:
                # Maps are kept by the coordinates' object.
                try:
                    entry.over(entry.features[:rows].clone(), entry.coords[:rows].clone())
                except ExportError:
                    raise
                except (IndexError, RuntimeError) as error:
                    what = f"{type(error).__name__}: {str(error).rstrip('.')}"
                    raise LayerError(
                        f"raised {what}. While a package is recorded values mean nothing on the host; leave what reads "
                        "them to the program that plays the package."
                    ) from error
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
    if learner.unbounded and not all(step.derivable for step in learner.recording.steps):
        raise ExportError(
            "a layer makes coordinates within bounds that follow from the data in no way that kernels know."
        )
    return learner.recording, learner.unbounded


def _listed(changed: Sequence[tuple[Any, Any]]) -> str:
    if not changed:
        return "there are more of them"
    (name, one), (_, other) = changed[0]
    return f"{name} of {', '.join(map(str, one))} and of {', '.join(map(str, other))}"


def rows_of_levels(recording: Recording, rows: int) -> dict[int, int]:
    """Rows that levels have over inputs of so many rows, about."""
    grown = {index + 1: rows * count // max(1, recording.n_rows) for index, count in recording.rows.items()}
    return {0: rows, **{level: max(1, count) for level, count in grown.items()}}
