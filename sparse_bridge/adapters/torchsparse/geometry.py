"""Kernel offsets and output sites of each torchsparse release.

A layer is an offset list, a stride and, where outputs differ from inputs, a rule for their sites;
nothing else in the adapter knows about anchors, padding or tap order.

The core is given the axes in reverse, rows [b, z, y, x]: x is the fastest axis of odd kernels, and
the core likes neighbouring taps to be neighbours along its last axis.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Literal

import torch

from ...core.geometry.boxes import Box
from ...core.geometry.offsets import Offsets
from ...core.maps.coordinate_map import CoordinateMap
from ...core.maps.sites import Axis, sorted_sites
from ...errors import GeometryError, OverflowLimitError

__all__ = [
    "CORE_COLUMNS",
    "Bounds",
    "Layer",
    "Sites",
    "core_offsets",
    "generated_sites",
    "kernel_offsets",
    "layer_of",
    "output_sites",
    "shrunk_range",
]

Triple = tuple[int, int, int]
CORE_COLUMNS = [0, 3, 2, 1]
"""Columns of [b, x, y, z] in the core's order, and the other way round."""
Bounds = tuple[tuple[int, int, int, int], tuple[int, int, int, int]]
"""(lowest, highest) of every column, batch first; (0, -1) when there are no rows."""


@functools.lru_cache(maxsize=1024)
def _taps(kernel: Triple) -> tuple[Triple, ...]:
    """Taps in weight order: x fastest when the kernel volume is odd, z fastest when it is even."""
    kx, ky, kz = kernel
    if math.prod(kernel) % 2:
        return tuple((x, y, z) for z, y, x in itertools.product(range(kz), range(ky), range(kx)))
    return tuple(itertools.product(range(kx), range(ky), range(kz)))


def kernel_offsets(kernel: Triple, scale: Triple = (1, 1, 1)) -> list[Triple]:
    """`get_kernel_offsets`: odd sizes centred, even ones one cell further up than down; times
    `scale`."""
    return _shifted(kernel, tuple((k - 1) // 2 for k in kernel), scale)


def _shifted(kernel: Triple, origin: Sequence[int], scale: Sequence[int]) -> list[Triple]:
    return [
        tuple((t - o) * s for t, o, s in zip(tap, origin, scale, strict=True))  # type: ignore[misc]
        for tap in _taps(kernel)
    ]


@dataclasses.dataclass(frozen=True)
class Sites:
    """Where a strided layer has outputs.

    kind: "dense" as a dense convolution (2.1); "floor" the cells p // stride (2.1 hashmap mode);
    "cells" p // cell * cell with `cell` = tensor stride times stride (up to 2.0), towards zero if
    `truncate`; "reached" every multiple of `cell` that a tap reaches, from the lowest input
    coordinate on (up to 2.0).
    """

    kind: Literal["dense", "floor", "cells", "reached"]
    kernel: Triple
    stride: Triple
    padding: Triple = (0, 0, 0)
    cell: Triple = (1, 1, 1)
    shifts: tuple[Triple, ...] = ()
    truncate: bool = False
    keep_tail: bool = False


def core_offsets(offsets: Sequence[Triple]) -> Offsets:
    """Offsets along x, y, z as the core takes them."""
    return Offsets.of([offset[::-1] for offset in offsets])


@dataclasses.dataclass(frozen=True)
class Layer:
    """y[q] gathers x[step * q + offset], axes as in the core; sites None: outputs are the
    inputs."""

    offsets: Offsets
    step: Triple
    sites: Sites | None


@functools.lru_cache(maxsize=4096)
def layer_of(
    release: str,
    kernel: Triple,
    stride: Triple,
    padding: Triple,
    tensor_stride: Triple,
    kmap_mode: str,
    downsample_mode: str,
    keep_tail: bool,
) -> Layer:
    """The geometry of a convolution.

    release: "1.4", "2.0" or "2.1".  padding, kmap_mode ("hashmap_on_the_fly" or "hashmap"),
    downsample_mode ("spconv" or "minkowski") and keep_tail matter for 2.1 only, tensor_stride for
    the older ones only. Raises GeometryError, OverflowLimitError.
    """
    _check(kernel, stride, padding)
    if release != "2.1":
        return _old_layer(release, kernel, stride, tensor_stride)
    strided = max(stride) > 1
    centred = tuple((k - 1) // 2 for k in kernel)
    one = (1, 1, 1)
    by_hash = kmap_mode == "hashmap"
    if not strided:
        forward = not by_hash and math.prod(kernel) % 2 == 0
        offsets = core_offsets(_shifted(kernel, (0, 0, 0) if forward else centred, one))
        return Layer(offsets, one, None)
    offsets = core_offsets(_shifted(kernel, centred if by_hash else padding, one))
    tiled = all(s in (1, k) for s, k in zip(stride, kernel, strict=True))
    if by_hash and (tiled or downsample_mode == "minkowski"):
        return Layer(offsets, stride[::-1], Sites("floor", kernel, stride))
    return Layer(
        offsets, stride[::-1], Sites("dense", kernel, stride, padding, keep_tail=keep_tail)
    )


def _old_layer(release: str, kernel: Triple, stride: Triple, tensor_stride: Triple) -> Layer:
    """Coordinates stay at the input's resolution, so offsets grow with the tensor stride."""
    one = (1, 1, 1)
    shifts = kernel_offsets(kernel, tensor_stride)
    if max(stride) == 1:
        return Layer(core_offsets(shifts), one, None)
    cell: Triple = tuple(t * s for t, s in zip(tensor_stride, stride, strict=True))  # type: ignore[assignment]
    if all(s in (1, k) for s, k in zip(stride, kernel, strict=True)):
        sites = Sites("cells", kernel, stride, cell=cell, truncate=release == "2.0")
        return Layer(core_offsets(shifts), one, sites)
    reached = shifts
    if release == "2.0" and math.prod(kernel) % 2 == 0:
        # Its candidates for even kernels start at 0, although its map is as ever.
        reached = _shifted(kernel, (0, 0, 0), tensor_stride)
    sites = Sites("reached", kernel, stride, cell=cell, shifts=tuple(reached))
    return Layer(core_offsets(shifts), one, sites)


def _check(kernel: Triple, stride: Triple, padding: Triple) -> None:
    if min(kernel) < 1 or min(stride) < 1 or min(padding) < 0:
        raise GeometryError(
            f"kernel size {kernel}, stride {stride}, padding {padding}; sizes and strides start "
            "at 1, padding at 0."
        )
    if math.prod(kernel) > 1 << 16:
        raise OverflowLimitError(f"a kernel of {math.prod(kernel)} taps; at most 65536 are served.")


def shrunk_range(
    spatial_range: Sequence[int] | None,
    kernel: Triple,
    stride: Triple,
    padding: Triple,
    keep_tail: bool = False,
) -> tuple[int, ...] | None:
    """`spatial_range` behind a layer (2.1): the grid of a dense convolution, even for stride 1."""
    if spatial_range is None:
        return None
    if len(spatial_range) < 4:
        raise GeometryError(f"spatial_range is {tuple(spatial_range)}; expected (batch, x, y, z).")
    grid = []
    for extent, k, s, p in zip(spatial_range[1:4], kernel, stride, padding, strict=True):
        size = (int(extent) + 2 * p - k) // s + 1
        grid.append(max(size, (int(extent) - 1 + p) // s + 1) if keep_tail and s > 1 else size)
    return (int(spatial_range[0]), *grid)


def output_sites(
    sites: Sites, x: CoordinateMap, bounds: Bounds, spatial_range: Sequence[int] | None
) -> tuple[torch.Tensor, Box]:
    """Output coordinates [b, x, y, z] in ascending order, and a box around them.

    x: in the core's order.  bounds: of x's rows as [b, x, y, z]; exact where `spatial_range` is
    None, as the rules ask for extremes of the data. With a range, rows outside have no part.
    """
    low, high = bounds
    axes: list[Axis] = []
    lo, size = [low[0]], [high[0] - low[0] + 1]
    for axis in range(3):
        values = x.coords[:, 3 - axis].long().unsqueeze(1)
        least, most = low[axis + 1], high[axis + 1]
        if sites.kind == "dense":
            extent = None if spatial_range is None else int(spatial_range[axis + 1])
            candidates, ok, first, last = _dense(sites, axis, values, least, most, extent)
        elif sites.kind == "reached":
            candidates, ok, first, last = _reached(sites, axis, values, least, most)
        else:
            candidates, ok, first, last = _cells(sites, axis, values, least, most)
        axes.append((candidates, ok))
        lo.append(first)
        size.append(max(0, last - first + 1))
    box = Box.spanning(tuple(lo), tuple(size))
    if min(size) == 0:
        return x.coords[:0].clone(), box
    return sorted_sites(x.coords[:, 0], axes, box), box


_Candidates = tuple[torch.Tensor, "torch.Tensor | None", int, int]
"""(candidates [N, m], which count, smallest and largest that can)"""


def _dense(
    sites: Sites, axis: int, values: torch.Tensor, least: int, most: int, extent: int | None
) -> _Candidates:
    """Every q with a tap on the value: value = q * s - pad + t, 0 <= t < k, inside the dense
    output."""
    k, s, pad = sites.kernel[axis], sites.stride[axis], sites.padding[axis]
    span = -(-k // s)
    length = most + 1 if extent is None else extent
    last = (length + 2 * pad - k) // s
    if sites.keep_tail:
        last = max(last, (length - 1 + pad) // s)
    # An axis with negative coordinates extends below 0 as far as they do.
    first = 0 if extent is not None or least >= 0 else (least + pad) // s - span + 1
    moved = values + pad
    steps = torch.arange(span, device=values.device)
    candidates = torch.div(moved, s, rounding_mode="floor") - steps
    # Where the bounds prove that every candidate counts, nothing needs to be looked at.
    limit = most + 1 if extent is None else extent
    inside = extent is None or (least >= 0 and most < limit)
    if (
        inside
        and span == 1
        and s <= k
        and (least + pad) // s >= first
        and (most + pad) // s <= last
    ):
        return candidates, None, first, last
    ok = (moved - candidates * s < k) & (candidates >= first) & (candidates <= last)
    if not inside:
        ok &= (values >= 0) & (values < limit)
    return candidates, ok, first, last


def _cells(sites: Sites, axis: int, values: torch.Tensor, least: int, most: int) -> _Candidates:
    """The cell of each value: its index ("floor"), or its first coordinate ("cells")."""
    width = sites.stride[axis] if sites.kind == "floor" else sites.cell[axis]
    unit = 1 if sites.kind == "floor" else width
    rounding = "trunc" if sites.truncate else "floor"
    candidates = torch.div(values, width, rounding_mode=rounding) * unit
    last = most // width * unit
    if sites.truncate and most < 0:
        last = -(-most // width) * unit
    return candidates, None, least // width * unit, last


def _reached(sites: Sites, axis: int, values: torch.Tensor, least: int, most: int) -> _Candidates:
    """Multiples of the cell among value + shift, from the lowest value on."""
    shifts = sorted({shift[axis] for shift in sites.shifts})
    candidates = values + torch.tensor(shifts, device=values.device)
    ok = (candidates % sites.cell[axis] == 0) & (candidates >= least)
    return candidates, ok, least, most + max(0, shifts[-1])


def generated_sites(
    x: CoordinateMap, kernel: Triple, stride: Triple, out_range: Sequence[int]
) -> tuple[torch.Tensor, Box]:
    """Every site x * stride + kernel offset, moved into `out_range` where it leaves it (2.1).

    x: in the core's order.  Returns coordinates [b, x, y, z], ascending, and a box around them.
    """
    axes: list[Axis] = []
    for axis in range(3):
        shifts = [t - (kernel[axis] - 1) // 2 for t in range(kernel[axis])]
        values = x.coords[:, 3 - axis].long().unsqueeze(1) * stride[axis]
        reached = values + torch.tensor(shifts, device=values.device)
        axes.append((reached.clamp(0, int(out_range[axis + 1]) - 1), None))
    lo, size = (x.box.lo[0], 0, 0, 0), (x.box.size[0], *(int(n) for n in out_range[1:4]))
    box = Box.spanning(lo, size)
    return sorted_sites(x.coords[:, 0], axes, box), box
