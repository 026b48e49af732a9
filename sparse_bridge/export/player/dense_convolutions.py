"""Convolutions over dense grids, as behind `dense()`, by the kernels of sparse ones: every cell is a row, and which
row meets which is a table that is known now. Results have their channels side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ... import settings
from ...core.conv.convolution import convolve
from ...core.conv.epilogue import Epilogue
from ...core.maps.kernel_map import KernelMap
from ...core.maps.rulebook import Rulebook
from ...core.ops import pointwise
from ...kernels.maps.neighbor_table import NeighborTable
from ...kernels.ops.elementwise import elementwise
from .recorder import Recorder

_Ints = Sequence[int]


def convolution(it: Recorder, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Of a grid [B, C, S1 .. SD] with a constant weight, perhaps transposed."""
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = args
    if groups != 1 or it.is_written(weight) or (bias is not None and it.is_written(bias)) or x.ndim < 3:
        return NotImplemented
    if not pointwise.by_kernel(x[:, :, 0, 0] if x.ndim == 4 else x.flatten(2)[:, :, 0], *_as_matrix(weight, bias)):
        return NotImplemented
    kernel, sizes = weight.shape[2:], x.shape[2:]
    step, pad, apart, more = (_each(value, len(kernel)) for value in (stride, padding, dilation, output_padding))
    alone = [(kernel[i], step[i], pad[i], more[i]) == (1, 1, 0, 0) for i in range(len(kernel))]
    if any(it.by_rows(x, 2 + i) and not alone[i] for i in range(len(kernel))):
        return NotImplemented
    reach = [apart[i] * (kernel[i] - 1) + 1 for i in range(len(kernel))]
    if transposed:
        out = [(sizes[i] - 1) * step[i] - 2 * pad[i] + reach[i] + more[i] for i in range(len(kernel))]
    else:
        out = [(sizes[i] + 2 * pad[i] - reach[i]) // step[i] + 1 for i in range(len(kernel))]
    key = ("grid", x.shape[0], tuple(sizes), tuple(out), tuple(kernel), *map(tuple, (step, pad, apart)), transposed)
    if key not in it.tables:
        it.tables[key] = _table(x.shape[0], sizes, out, kernel, step, pad, apart, transposed)
    inner = (0, 1) if transposed else (1, 0)  # input and output channels of the weight
    matrices = weight.permute(*range(2, weight.ndim), *inner).reshape(
        -1, weight.shape[inner[0]], weight.shape[inner[1]]
    )
    with it, settings.override(dataflow="unmasked"):
        y = convolve(_rows_of(it, x), matrices.contiguous(), it.tables[key], Epilogue(bias), pointwise.form_of(x))
    it.channels_last.add(y.untyped_storage().data_ptr())
    return y.view(x.shape[0], *out, -1).movedim(-1, 1)


def _as_matrix(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    return weight.flatten(2)[:, :, 0].t(), bias


def _each(value: int | _Ints, axes: int) -> _Ints:
    own = [value] if isinstance(value, int) else list(value)
    return own * axes if len(own) == 1 else own


def _rows_of(it: Recorder, x: torch.Tensor) -> torch.Tensor:
    """[B * cells, C]: a view where channels lie side by side, else a copy."""
    last = x.movedim(1, -1)
    if not last.is_contiguous():
        last = elementwise("copy", [last], it.new(last.shape, x.dtype), it.target)
    return last.view(-1, x.shape[1])


def _table(
    n_items: int, sizes: _Ints, out: _Ints, kernel: _Ints, step: _Ints, pad: _Ints, apart: _Ints, transposed: bool
) -> KernelMap:
    """Which cell of the input meets which of the output at which kernel offset."""
    places: list[torch.Tensor] = []  # by axis [kernel, out], -1 outside
    for i in range(len(kernel)):
        offset, cell = torch.arange(kernel[i])[:, None] * apart[i], torch.arange(out[i])[None, :]
        if transposed:
            at = cell + pad[i] - offset
            own = torch.where(at % step[i] == 0, at // step[i], -1)
        else:
            own = cell * step[i] - pad[i] + offset
        places.append(torch.where((own >= 0) & (own < sizes[i]), own, -1))
    table, axes = torch.zeros((), dtype=torch.int64), len(kernel)
    outside = torch.zeros((), dtype=torch.bool)
    for i, own in enumerate(places):
        shape = [1] * (2 * axes)
        shape[i], shape[axes + i] = own.shape
        table, outside = table * sizes[i] + own.view(shape), outside | (own.view(shape) < 0)
    cells = math.prod(sizes)
    item = torch.arange(n_items).view(*[1] * axes, n_items, *[1] * axes)
    split = [*range(axes), *range(axes, 2 * axes)]
    rows = table.permute(split).unsqueeze(axes) + item * cells
    rows = torch.where(outside.unsqueeze(axes), -1, rows).int().reshape(math.prod(kernel), -1)
    pitch = -(-rows.shape[1] // 4) * 4  # rows of a table begin at multiples of 16 bytes
    wide = torch.full((rows.shape[0], pitch), -1, dtype=torch.int32)
    wide[:, : rows.shape[1]] = rows
    n_out = n_items * math.prod(out)
    rulebook = Rulebook(n_items * cells, n_out, len(rows), torch.device("cpu"), views=(NeighborTable(wide), None))
    return KernelMap(rulebook)
