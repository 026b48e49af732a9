"""Scenes that are recorded with a package: inputs, and what the model makes of them in Python.

`scenes.txt` has a line per tensor, `scenes.bin` their values one after another, so that a program
needs nothing to read them:

    scene
    input DTYPE DIMENSIONS SIZE ...
    output LIMIT DTYPE DIMENSIONS SIZE ...

LIMIT: the RMS of the error that is allowed, as a share of the RMS of the values.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO, TextIO

import torch
from torch.utils import _pytree as pytree

from .. import tolerances
from .plugin_checks import ExportError

Scene = tuple[torch.Tensor, ...]


def tensors_of(result: Any) -> list[torch.Tensor]:
    """The tensors of a result, in the order in which a package returns them."""
    leaves = pytree.tree_leaves(result)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise ExportError(
                f"the model returned a {type(leaf).__name__}; a package returns tensors, alone or "
                "in tuples, lists and dictionaries. Read what you need of sparse tensors inside of "
                "the model: features, indices or dense()."
            )
    return leaves


def half_of(inputs: Scene) -> Scene:
    """The first half of the rows of every input."""
    return tuple(tensor[: max(2, len(tensor) // 2)].contiguous() if tensor.dim() else tensor for tensor in inputs)


def record(model: Callable[..., Any], scenes: Iterable[Scene], folder: pathlib.Path, tf32: bool = False) -> None:
    """Write `scenes.txt` and `scenes.bin`. tf32: fp32 products may be rounded so where they are played."""
    with (folder / "scenes.txt").open("w") as text, (folder / "scenes.bin").open("wb") as values:
        for inputs in scenes:
            with torch.no_grad():
                result = model(*inputs)
            text.write("scene\n")
            for tensor in inputs:
                _write("input", tensor, text, values)
            for tensor in tensors_of(result):
                _write(f"output {_limit(tensor, tf32)}", tensor, text, values)


def _limit(tensor: torch.Tensor, tf32: bool) -> float:
    if not tensor.is_floating_point():
        return 0.0
    return tolerances.of("network", "tf32" if tf32 and tensor.dtype == torch.float32 else tensor.dtype).rms


def _write(label: str, tensor: torch.Tensor, text: TextIO, values: BinaryIO) -> None:
    sizes = " ".join(map(str, (tensor.dim(), *tensor.shape)))
    text.write(f"{label} {str(tensor.dtype).removeprefix('torch.')} {sizes}\n")
    flat = tensor.detach().contiguous().flatten()
    values.write(flat.view(torch.uint8).numpy().tobytes())
