"""A folder for programs on a GPU without Python: the package, the player in C, an example and recorded scenes."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Sequence

import torch
from torch import nn

from ...core.device import selection
from .. import package_scenes
from ..plugin_checks import ExportError
from . import package_file
from .library import SOURCES
from .package_file import Program
from .record import record

MODEL = "model.sbp"


def export_gpu_package(
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    folder: str | os.PathLike[str],
    *,
    targets: Sequence[str],
    rows: int,
    scenes: Sequence[Sequence[torch.Tensor]] = (),
) -> list[Program]:
    """Write a network of spconv layers as a folder for programs on a GPU. No GPU is needed. Other threads must not
    compute layers meanwhile.

    model: in eval mode, on the CPU; takes features [N, C] and int32 coordinates [N, 4], in any order, and returns
        tensors, perhaps in tuples, lists and dictionaries.
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
    if not len(inputs[0]) <= rows < 1 << 31:
        raise ExportError(f"rows is {rows}; expected at least the {len(inputs[0])} rows of the example.")
    programs = [record(model, inputs, rows, target) for target in dict.fromkeys(targets)]
    folder = pathlib.Path(folder)
    shutil.copytree(SOURCES, folder, copy_function=shutil.copy, dirs_exist_ok=True)
    others = list(scenes) or [package_scenes.half_of(tuple(inputs))]
    with selection.standing_in("torch"):
        package_scenes.record(model, [tuple(scene) for scene in (inputs, *others)], folder)
    package_file.write(folder / MODEL, programs)
    return programs
