"""Which kernel serves each kind of layer of the matrix, on every family of devices:

    python -m compat.launches

writes docs/launches.md from `compat/matrix/layers.json` and the rules of the engine. No device is
needed: the rules are asked as on each GPU. Tuned or forced choices are not in the page.
"""

from __future__ import annotations

import contextlib
import itertools
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple
from unittest import mock

import torch

from sparse_bridge import settings
from sparse_bridge.core.conv import kernel_products, registry
from sparse_bridge.core.conv.dataflow import Case, LayerProduct
from sparse_bridge.core.conv.kernel_products import GatherProduct, KernelDataflow
from sparse_bridge.core.geometry.weights import layout_of
from sparse_bridge.core.maps.rulebook import Rulebook
from sparse_bridge.kernels.runtime.target import Target, described

from .layers import Layer, read

__all__ = ["PAGE", "chosen", "page"]

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "launches.md"
# A GPU of each family, and its compute units: rules weigh work against them.
FAMILIES = {
    "cdna2": ("gfx90a", 104),
    "cdna3": ("gfx942", 304),
    "cdna4": ("gfx950", 256),
    "rdna3": ("gfx1100", 96),
    "rdna4": ("gfx1201", 64),
    "turing": ("sm_75", 40),
    "ampere": ("sm_80", 108),
    "ada": ("sm_89", 128),
    "hopper": ("sm_90", 132),
    "blackwell": ("sm_100", 148),
    "blackwell RTX": ("sm_120", 170),
}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
ROWS = (500, 5_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000)
PASSES = ("inference", "training", "input gradient", "weight gradient")
_GPU, _NOWHERE, _TORCH = torch.device("cuda"), torch.device("cpu"), "torch"


class Question(NamedTuple):
    """A layer in a pass over a scene."""

    layer: Layer
    dtype: torch.dtype
    which: str
    n_rows: int


@contextlib.contextmanager
def _on(target: Target) -> Iterator[None]:
    """Rules answer as on a GPU of this kind whose self-check has passed."""
    patched = mock.patch.object(kernel_products, "kernel_target", lambda *_: target)
    with patched, settings.override(dataflow="auto", tune="off", self_check=False):
        yield


def chosen(question: Question, target: Target) -> str:
    """The kernel of a question and its dataflow, or "torch"."""
    layer, dtype, which, n_rows = question
    case = Case(_GPU, dtype)
    with _on(target):
        if layer.kind == "linear":
            return _TORCH
        if layer.kind != "conv":
            return _TORCH if registry.row_kernels(case)[1] is None else _row_kernel(layer, which)
        flow = registry.choose(case)
        if not isinstance(flow, KernelDataflow):
            return _TORCH
        if which == "weight gradient":
            return "wgrad_gemm"
        weight = torch.empty(layer.offsets, layer.c_in, layer.c_out * layer.groups, dtype=dtype, device="meta")
        w = layout_of(weight, "vio", layer.groups)
        side = int(which == "input gradient")
        book = Rulebook(n_rows, n_rows, layer.offsets, _NOWHERE, symmetric=layer.symmetric)
        book.trained = which != "inference"
        product = LayerProduct(target, _GPU, dtype, "ieee", w.transposed() if side else w)
        serving = flow.serving(book, side, product)
        return f"{_kernel(serving, product)} ({serving.name})"


def _row_kernel(layer: Layer, which: str) -> str:
    back = PASSES.index(which) >= PASSES.index("input gradient")
    if layer.kind == "pool":
        return "-" if which == "weight gradient" else f"pool_{'backward' if back else 'forward'}"
    return "channelwise_wgrad" if which == "weight gradient" else "channelwise_gather"


def _kernel(flow: KernelDataflow, product: LayerProduct) -> str:
    if flow.name == "grouped":
        return "grouped_gemm"
    return "narrow_gemm" if flow.packs(GatherProduct(flow, product).product) else "gather_gemm"


def _over_rows(layer: Layer, dtype: torch.dtype, which: str, target: Target) -> str:
    """The choices over scenes of growing size: "A to 20k rows, B beyond"."""
    choices = [(n, chosen(Question(layer, dtype, which, n), target)) for n in ROWS]
    runs = [(name, list(group)) for name, group in itertools.groupby(choices, lambda one: one[1])]
    if len(runs) == 1:
        return runs[0][0]
    ends = [f"{name} to {group[-1][0] // 1000 or 0.5}k rows" for name, group in runs[:-1]]
    return ", ".join([*ends, f"{runs[-1][0]} beyond"])


def _answers(layer: Layer, dtype: torch.dtype, which: str) -> str:
    """One cell: what serves most families, and others where it is something else. A family that
    does not multiply bf16 is left out."""
    by_answer: dict[str, list[str]] = {}
    for family, (arch, units) in FAMILIES.items():
        target = described(arch, units)
        if dtype != torch.bfloat16 or target.has_bf16:
            by_answer.setdefault(_over_rows(layer, dtype, which, target), []).append(family)
    most, *rest = sorted(by_answer.items(), key=lambda item: -len(item[1]))
    return "; ".join([most[0], *(f"{', '.join(where)}: {answer}" for answer, where in rest)])


def _name(layer: Layer) -> str:
    if layer.kind != "conv":
        return layer.kind
    return f"{'same rows' if layer.symmetric else 'other rows'}, {layer.offsets} offsets" + (
        ", groups" if layer.groups > 1 else ""
    )


def _representatives(counts: Mapping[Layer, int]) -> Iterable[tuple[str, int, list[Layer]]]:
    """Kinds of layers, how many models' layers are of each, and the narrowest, the most frequent
    and the widest."""
    kinds: dict[str, list[Layer]] = {}
    for layer in sorted(counts):
        kinds.setdefault(_name(layer), []).append(layer)
    for name, layers in kinds.items():
        by_size = sorted(layers, key=lambda one: (one.c_in * one.c_out, one))
        often = max(by_size, key=lambda one: counts[one])
        picked = dict.fromkeys((by_size[0], often, by_size[-1]))
        yield name, sum(counts[one] for one in layers), sorted(picked, key=by_size.index)


HEAD = """# Which kernel serves which layer

For those who change a rule, or wonder what a GPU runs: which kernel serves which layer.

The layers are those of the models in [compatibility](compatibility.md). The kernels are those of
the rules alone, without tuning and with nothing forced. A test compares this page with the rules,
so that a change of one shows in its diff. The page is made by

    python -m compat.launches

Rows: layers of a kind in the narrowest, the most frequent and the widest form that the models have.
Same rows: submanifold layers, where input and output have the same voxels. Other rows: strided,
inverse, transposed and generative ones. A cell: the kernel, its dataflow in brackets; where some
families of GPUs differ, what they take behind the semicolon; where the size of the scene decides,
up to how many rows. torch: no kernel of this package. So it is on CPUs, in fp64 everywhere and in
bf16 on Turing. fp32 is IEEE or three TF32 products, by the same kernels. Rules ask how many compute
units a GPU has. Here: {gpus}.
"""


def page(counts: Mapping[Layer, int]) -> str:
    """The page for layers that so many models have."""
    gpus = ", ".join(f"{arch} with {units}" for arch, units in FAMILIES.values())
    lines = [HEAD.format(gpus=gpus)]
    for name, total, layers in _representatives(counts):
        lines += [f"## {name}", "", f"{total} in the models.", ""]
        lines += [f"| channels | dtype | {' | '.join(PASSES)} |", f"|---|---{'|---' * 4}|"]
        for layer in layers:
            lines += _table_rows(layer)
        lines.append("")
    return "\n".join(lines)


def _table_rows(layer: Layer) -> list[str]:
    """A row for each dtype; dtypes with the same answers share one."""
    by_cells: dict[tuple[str, ...], list[str]] = {}
    for name, dtype in DTYPES.items():
        cells = tuple(_answers(layer, dtype, which) for which in PASSES)
        by_cells.setdefault(cells, []).append(name)
    channels = f"{layer.c_in} to {layer.c_out}"
    if layer.groups > 1:
        channels += f", {layer.groups} times"
    return [f"| {channels} | {', '.join(names)} | {' | '.join(cells)} |" for cells, names in by_cells.items()]


def main() -> None:
    PAGE.write_text(page(read()), encoding="utf-8")


if __name__ == "__main__":
    main()
