"""A folder for programs on a GPU without Python: the package, the player in C, an example and recorded scenes."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from ...core.device import selection
from ...core.maps.coordinate_map import MOST_KEYS
from .. import package_scenes
from ..plugin_checks import ExportError
from . import package_file
from .entry import entry_of
from .library import SOURCES
from .package_file import Program
from .record import record, target_of

MODEL = "model.sbp"


def export_gpu_package(
    model: nn.Module,
    inputs: Sequence[Any],
    folder: str | os.PathLike[str],
    *,
    targets: Sequence[str],
    rows: int,
    scenes: Sequence[Sequence[Any]] = (),
) -> list[Program]:
    """Write a network of sparse layers as a folder for programs on a GPU. No GPU is needed. Other threads must not
    compute layers meanwhile.

    model: in eval mode, on the CPU; takes features [N, C] and int32 coordinates [N, 4], in any order, or one sparse
        tensor, and returns tensors and sparse tensors, perhaps in tuples, lists and dictionaries. A sparse tensor
        comes out as its features and its coordinates.
    inputs: of one scene, distinct rows inside of the grid; how levels grow from one to the next is taken from it.
    folder: what it holds is replaced by name; made where it is not there.
    targets: "cuda:87" (a compute capability) or "hip:gfx942", one or more.
    rows: of an input at most. Memory is taken for so many.
    scenes: inputs of further scenes to record. Without any, half of the rows of `inputs`.
    Returns what was written for each target.
    Raises: ExportError for what a package does not hold, with the module and the line.
    """
    if model.training:
        raise ExportError("the model is in training mode; packages are for inference: model.eval().")
    if not targets:
        raise ExportError("no target was named; expected names like cuda:87 or hip:gfx942.")
    targets = list(dict.fromkeys(targets))
    for target in targets:
        target_of(target)
    entry, more = entry_of(model, inputs), [entry_of(model, scene) for scene in scenes]
    if rows > MOST_KEYS:
        raise ExportError(f"rows is {rows}; expected at most {MOST_KEYS}, for which a hash table has room.")
    with _memory_for(rows):
        programs = [record(model, inputs, rows, target, more) for target in targets]
    folder = pathlib.Path(folder)
    shutil.copytree(SOURCES, folder, copy_function=shutil.copy, dirs_exist_ok=True)
    recorded: list[package_scenes.Scene] = [(own.features, own.coords) for own in (entry, *more)]
    recorded += [] if scenes else [package_scenes.half_of(recorded[0])]
    with selection.standing_in("torch"):
        package_scenes.record(entry.over, recorded, folder, entry.tf32)
    package_file.write(folder / MODEL, programs)
    return programs


@contextlib.contextmanager
def _memory_for(rows: int) -> Iterator[None]:
    """Raises ExportError where the host has no memory for tensors of so many rows."""
    try:
        yield
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):
            raise
        raise ExportError(f"this machine has no memory to record {rows} rows; package with fewer --rows.") from error
