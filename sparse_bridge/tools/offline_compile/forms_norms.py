"""Forms of the kernels that normalise rows, or add them up."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from ...kernels.ops import batch_norm, batch_norm_grad, column_sum, norm_spec
from ...kernels.runtime.launch import Kernel
from ...kernels.runtime.target import Target
from .forms import ALIGNS, Form, Space, make

# (channels of a program, what is known of a row's: 16 for a multiple of it, 1, or 3 for nothing)
_WIDTHS = ((32, 16), (16, 16), (32, 3), (16, 3), (16, 1))
_SILENT = ("align",)


def _rows(kernel: Kernel, widths: tuple[int, int], align: str, whole: bool, **types: str) -> Form:
    """whole: the kernel merges parts."""
    width, columns = widths
    tile = norm_spec.tile_of(width, columns == 16 and align != "odd")
    names = [name for name in kernel.fn.arg_names if name.endswith("_ptr")]
    general = {p.name for p in getattr(kernel.fn, "params", ()) if p.do_not_specialize}
    even = [name for name in names if name not in general] if align != "odd" else ["memory_ptr"]
    even += ["n_channels"] if columns == 16 else []
    form = make(
        kernel,
        (norm_spec.PARTS, *tile) if whole else tile,
        batch_norm.OPTIONS,
        even,
        ["n_channels"] if columns == 1 else [],
        memory="fp32",
        **types,
    )
    return dataclasses.replace(form, large=align == "large")


def _partials(rows: tuple[str, tuple[int, int]], align: str) -> Form:
    """rows: what they hold, and their width."""
    dtype, widths = rows
    return _rows(batch_norm.partials_kernel, widths, align, False, x=dtype)


def _apply(rows: tuple[str, tuple[int, int]], vectors: tuple[str, str], batches: str, align: str) -> Form:
    """vectors: what (weight and bias, running statistics) hold."""
    (dtype, widths), (of_layer, running) = rows, vectors
    return _rows(
        batch_norm.apply_kernel,
        widths,
        align,
        True,
        x=dtype,
        y=dtype,
        gain=of_layer,
        beta=of_layer,
        mean=running,
        var=running,
        batches=batches,
        momentum="fp32",
        eps="fp32",
    )


def _backward(kernel: Kernel, rows: tuple[str, tuple[int, int]], vectors: tuple[str, str], align: str) -> Form:
    """vectors: what (weight and bias, their gradients) hold."""
    (dtype, widths), whole = rows, kernel is batch_norm_grad.dx_kernel
    types = dict.fromkeys(("x", "dy"), dtype) | dict.fromkeys(("gain", "beta"), vectors[0])
    if whole:
        types |= {"dx": dtype} | dict.fromkeys(("dgain", "dbeta"), vectors[1])
    return _rows(kernel, widths, align, whole, **types)


def _column_partials(rows: tuple[str, tuple[int, int]], align: str) -> Form:
    dtype, (width, columns) = rows
    return _columns(
        column_sum.partials_kernel, (column_sum.TILE // width, width), columns, align, x=dtype, partial="fp32"
    )


def _column_totals(dtype: str, columns: int, align: str) -> Form:
    constants = (column_sum.PARTS, column_sum.WIDTHS[0])
    return _columns(column_sum.totals_kernel, constants, columns, align, partial="fp32", y=dtype)


def _columns(kernel: Kernel, constants: tuple[int, int], columns: int, align: str, **types: str) -> Form:
    """columns: see `_WIDTHS`."""
    form = make(kernel, constants, column_sum.OPTIONS, ["partial_ptr"], align=align, **types)
    divisible, ones = form.divisible, form.ones
    if columns == 16:
        divisible |= {"n_channels"}
    elif columns == 1:
        ones |= {"n_channels"}
    return dataclasses.replace(form, divisible=divisible, ones=ones)


def declare(target: Target) -> Iterator[tuple[Kernel, list[Space]]]:
    """The spaces of each kernel of batch norms and column sums."""
    floats = ("fp32", "fp16", *(("bf16",) if target.has_bf16 else ()))
    rows: dict[str, tuple] = {"rows": tuple((dtype, widths) for dtype in floats for widths in _WIDTHS), "align": ALIGNS}
    # Whoever has no vector gives fp32 memory in its place.
    vectors = {"vectors": [(a, b) for a in floats for b in floats]}
    batches = {"batches": ("i64", "fp32")}
    yield batch_norm.partials_kernel, [Space(rows, _partials, "rows", silent=_SILENT)]
    applied = {**rows, **vectors, **batches}
    yield batch_norm.apply_kernel, [Space(applied, _apply, "rows", silent=_SILENT)]
    for kernel in (batch_norm_grad.grad_partials_kernel, batch_norm_grad.dx_kernel):
        build = functools.partial(_backward, kernel)
        yield kernel, [Space({**rows, **vectors}, build, "rows", silent=_SILENT)]
    narrow, wide = column_sum.WIDTHS
    widths = ((wide, 16), (narrow, 16), (wide, 3), (narrow, 3), (narrow, 1))
    summed = {**rows, "rows": tuple((dtype, pair) for dtype in floats for pair in widths)}
    yield column_sum.partials_kernel, [Space(summed, _column_partials, "rows", silent=_SILENT)]
    totals = {"dtype": floats, "columns": (16, 3, 1), "align": ALIGNS}
    silent = ("columns", "align")
    yield column_sum.totals_kernel, [Space(totals, _column_totals, silent=silent)]
