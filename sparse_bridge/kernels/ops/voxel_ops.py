"""Points and voxels: sums over the voxels of a point, trilinear weights, counts.

The gradient of `gather_sum` is the sum over the points of a voxel, which `segment_sum` takes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..runtime.launch import alignment, cdiv, power_of_2, register
from ..runtime.target import Target

OPTIONS = {"num_warps": 4}
_ROWS = 32
_POINTS = 128


@triton.jit(do_not_specialize=["n_rows", "n_sources", "n_channels"])
def _gather_sum(
    x_ptr,
    index_ptr,
    weight_ptr,
    count_ptr,
    y_ptr,
    n_rows,
    n_sources,
    n_channels,
    K: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_COUNT: tl.constexpr,
    FP64: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """y[i, c] = sum over k < K of weight[i, k] * x[index[i, k], c] / count[index[i, k]].

    An index outside 0 .. n_sources - 1, or with a count of 0, adds nothing.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    ok_r = row < n_rows
    ok_c = channel < n_channels
    acc = tl.zeros((ROWS, CHANNELS), tl.float64 if FP64 else tl.float32)
    for k in range(K):
        offs_k = row.to(tl.int64) * K + k
        source = tl.load(index_ptr + offs_k, mask=ok_r, other=-1)
        present = (source >= 0) & (source < n_sources)
        if HAS_COUNT:
            count = tl.load(count_ptr + source, mask=present, other=0).to(acc.dtype)
            present = present & (count > 0)
        ok = present[:, None] & ok_c[None, :]
        offs_x = source.to(tl.int64)[:, None] * n_channels + channel[None, :]
        value = tl.load(x_ptr + offs_x, mask=ok, other=0.0).to(acc.dtype)
        if HAS_WEIGHT:
            value = value * tl.load(weight_ptr + offs_k, mask=present, other=0.0).to(acc.dtype)[:, None]
        if HAS_COUNT:
            value = value / tl.where(count > 0, count, 1.0)[:, None]
        acc += value
    out = y_ptr + row.to(tl.int64)[:, None] * n_channels + channel[None, :]
    tl.store(out, acc.to(y_ptr.dtype.element_ty), mask=ok_r[:, None] & ok_c[None, :])


@triton.jit
def _corner(fraction, bit):
    """Share of a cell's low (bit 0) or high (bit 1) side."""
    return tl.where(bit > 0, fraction, 1.0 - fraction)


@triton.jit(do_not_specialize=["n_points", "stride_cn", "stride_cc"])
def _trilinear(
    coords_ptr, index_ptr, weight_ptr, n_points, scale, stride_cn, stride_cc, FP64: tl.constexpr, POINTS: tl.constexpr
):
    """weight [N, 8] of the corners 4 bx + 2 by + bz around each point, 0 where index < 0, each row
    divided by its sum."""
    point = tl.program_id(0) * POINTS + tl.arange(0, POINTS)[:, None]
    ok = point < n_points
    corner = tl.arange(0, 8)[None, :]
    product = tl.zeros((POINTS, 8), tl.float64 if FP64 else tl.float32) + 1.0
    for axis in tl.static_range(3):
        offs = point.to(tl.int64) * stride_cn + axis * stride_cc
        c = tl.load(coords_ptr + offs, mask=ok, other=0.0).to(product.dtype)
        cell = c / scale
        fraction = (c - tl.floor(cell) * scale) / scale
        product = product * _corner(fraction, (corner >> (2 - axis)) & 1)
    offs = point.to(tl.int64) * 8 + corner
    index = tl.load(index_ptr + offs, mask=ok, other=-1)
    product = tl.where(index >= 0, product, 0.0)
    product = product / (tl.sum(product, 1) + 1e-8)[:, None]
    tl.store(weight_ptr + offs, product.to(weight_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["n", "n_values"])
def _count_index(index_ptr, count_ptr, n, n_values, BLOCK: tl.constexpr):
    """count[v] += occurrences of v; values outside 0 .. n_values - 1 are passed over."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(index_ptr + offs, mask=offs < n, other=-1)
    ok = (value >= 0) & (value < n_values)
    tl.atomic_add(count_ptr + value, 1, mask=ok)


gather_sum_kernel = register(_gather_sum)
trilinear_kernel = register(_trilinear)
count_kernel = register(_count_index)


def gather_sum(
    x: torch.Tensor,
    index: torch.Tensor,
    weight: torch.Tensor | None,
    count: torch.Tensor | None,
    y: torch.Tensor,
    target: Target,
) -> None:
    """Write y [N, C]: the sum over k of weight[i, k] * x[index[i, k]] / count[index[i, k]].

    x [M, C] and weight [N, K]: contiguous floats.  index [N, K], count [M]: int32 or int64. Indices outside x, or
    with a count of 0, add nothing. Sums are fp32, of fp64 fp64.
    """
    (n_rows, n_channels), per_row = y.shape, index.shape[1]
    channels = min(64 if x.dtype == torch.float64 else 128, max(16, power_of_2(n_channels)))
    constants = (per_row, weight is not None, count is not None, x.dtype == torch.float64, _ROWS, channels)
    grid = (cdiv(n_rows, _ROWS), cdiv(n_channels, channels), 1)
    weight_arg, count_arg = (x if weight is None else weight), (index if count is None else count)
    key = (constants, x.dtype, y.dtype, weight_arg.dtype, index.dtype, count_arg.dtype)
    aligned = alignment(x, index, weight_arg, count_arg, y)
    gather_sum_kernel.launch(
        x.device,
        target,
        grid,
        (x, index, weight_arg, count_arg, y, n_rows, x.shape[0], n_channels),
        constants,
        OPTIONS,
        (key, aligned),
    )


def trilinear(coords: torch.Tensor, index: torch.Tensor, weight: torch.Tensor, scale: float, target: Target) -> None:
    """Write weight [N, 8], the trilinear weights of the corners of the cells around points, divided by their sum.

    coords: floats [N, >= 3] of any strides, x, y and z first.  index: int32 or int64 [N, 8], corner 4 * bx + 2 * by +
    bz; below 0 the weight is 0.  weight: floats, contiguous.  scale: width of a cell, in the unit of coords.
    """
    constants = (coords.dtype == torch.float64, _POINTS)
    key = (constants, coords.dtype, weight.dtype, index.dtype, float(scale) == 1.0)
    trilinear_kernel.launch(
        coords.device,
        target,
        (cdiv(coords.shape[0], _POINTS), 1, 1),
        (coords, index, weight, coords.shape[0], float(scale), coords.stride(0), coords.stride(1)),
        constants,
        OPTIONS,
        (key, alignment(coords, index, weight)),
    )


def count_index(index: torch.Tensor, count: torch.Tensor, target: Target) -> None:
    """Add to count int32 [M], which the caller has zeroed, the occurrences of each value in `index`, int32 or int64
    [N]. Values outside 0 .. M - 1 are passed over."""
    block = 1024
    count_kernel.launch(
        index.device,
        target,
        (cdiv(index.shape[0], block), 1, 1),
        (index, count, index.shape[0], count.shape[0]),
        (block,),
        OPTIONS,
        (index.dtype, alignment(index, count)),
    )
