"""The kinds of sparse layers that the models of the matrix have, as a program reads them off:

    python -m compat.layers

runs every model once on the CPU, over the smallest scene that it takes, and writes
`compat/matrix/layers.json`. Models that enable a framework in the same way share a process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from sparse_bridge.core.device import trace

from . import bridged, matrix, scenes
from .cellfile import from_json, to_json
from .matrix import Cell
from .subject import Subject

__all__ = ["LAYERS", "Layer", "apart", "cells_of", "layers_of", "read", "together", "write"]

LAYERS = pathlib.Path(__file__).with_name("matrix") / "layers.json"


@dataclasses.dataclass(frozen=True, order=True)
class Layer:
    """A layer as far as the choice of its kernels can depend on it.

    kind: "conv"; "channelwise", a depthwise one; "linear", 1x1x1, a product over all rows; "pool".
    offsets: of its kernel.  symmetric: its rows are the input's.  c_in, c_out: of one group.
    """

    kind: str
    offsets: int
    symmetric: bool
    c_in: int
    c_out: int
    groups: int = 1


def layers_of(cell: Cell) -> set[Layer]:
    """The layers that a model runs in inference."""
    found: set[Layer] = set()

    def see(plan: Any, weight: torch.Tensor, kmap: Any) -> None:
        book, w = kmap.rulebook, plan.w
        found.add(Layer("conv", w.n_offsets, book.symmetric, w.c_in, w.c_out, w.groups))

    with bridged.enable(cell), trace.watch(see), trace.record() as events:
        subject = Subject(cell.model, cell.device, cell.dtype, cell.size)
        with torch.no_grad():
            subject.run(subject.network().eval())
    for event in events:
        if event.kind != "conv":
            same = event.n_in == event.n_out
            found.add(Layer(event.kind, event.n_offsets, same, event.c_in, event.c_out))
    return found


def read(path: pathlib.Path = LAYERS) -> dict[Layer, int]:
    """Layers, and how many models have each."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    return {Layer(*row): count for *row, count in rows}


def write(counts: dict[Layer, int], path: pathlib.Path = LAYERS) -> None:
    """The file that `read` reads, a line for each layer."""
    rows = [json.dumps([*dataclasses.astuple(one), counts[one]]) for one in sorted(counts)]
    path.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")


def apart(program: str, cells: Sequence[Cell]) -> list[Any]:
    """What a program says of each cell, in a process with the environment of the first."""
    done = subprocess.run(
        [sys.executable, "-m", program, json.dumps([to_json(cell) for cell in cells])],
        env={**os.environ, **cells[0].model.environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def together(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Cells whose frameworks are enabled in the same way."""
    found: dict[Any, list[Cell]] = {}
    for cell in cells:
        model = cell.model
        key = model.framework, model.profile, *sorted(model.environment.items()), *model.also
        found.setdefault(key, []).append(cell)
    return list(found.values())


def cells_of(size: str = scenes.SIZES[0], device: str = "cpu") -> list[Cell]:
    """A cell of every model, but of those that have full size alone: of `size`, or the nearest size that it has."""
    found = []
    for model in matrix.load():
        sizes = [one for one in scenes.SIZES[:-1] if one in model.sizes]
        larger = [one for one in sizes if scenes.SIZES.index(one) >= scenes.SIZES.index(size)]
        found += [Cell(model, device, "float32", "standin", one) for one in (larger or sizes)[:1]]
    return found


def main(arguments: list[str]) -> None:
    """The layers of some cells, to standard output; or of all models, to the file."""
    if arguments:
        cells = map(from_json, json.loads(arguments[0]))
        found = [[dataclasses.astuple(one) for one in sorted(layers_of(cell))] for cell in cells]
        sys.stdout.write(json.dumps(found) + "\n")
        return
    counts: Counter[Layer] = Counter()
    for cells in together(cells_of()):
        for cell, rows in zip(cells, apart("compat.layers", cells), strict=True):
            layers = [Layer(*row) for row in rows]
            sys.stderr.write(f"{len(layers):4} {cell.model.name}\n")
            counts.update(layers)
    write(counts)


if __name__ == "__main__":
    main(sys.argv[1:])
