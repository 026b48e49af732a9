"""Kernel offsets and output sites of each torchsparse release.

A layer is an offset list, a stride and, where outputs differ from inputs, a rule for their sites;
nothing else in the adapter knows about anchors, padding or the order of offsets.

The core is given the axes in reverse, rows [b, z, y, x]: x is the fastest axis of odd kernels, and
the core likes neighbouring offsets to be neighbours along its last axis.
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
from ...core.geometry.reach import AxisReach, BoxReach
from ...errors import GeometryError, OverflowLimitError

Triple = tuple[int, int, int]
CORE_COLUMNS = [0, 3, 2, 1]
"""Columns of [b, x, y, z] in the core's order, and the other way round."""
Bounds = tuple[tuple[int, int, int, int], tuple[int, int, int, int]]
"""(lowest, highest) of every column, batch first; (0, -1) when there are no rows."""


@functools.lru_cache(maxsize=1024)
def _steps(kernel: Triple) -> tuple[Triple, ...]:
    """Steps of a box kernel in weight order: x fastest where its volume is odd, z where even."""
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
        tuple((t - o) * s for t, o, s in zip(step, origin, scale, strict=True))  # type: ignore[misc]
        for step in _steps(kernel)
    ]


@dataclasses.dataclass(frozen=True)
class Sites:
    """Where a strided layer has outputs.

    kind: "dense" as a dense convolution (2.1); "floor" the cells p // stride (2.1 hashmap mode);
    "cells" p // cell * cell with `cell` = tensor stride times stride (up to 2.0), towards zero if
    `truncate`; "reached" every multiple of `cell` that an offset reaches, from the lowest input
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
    """y[q] gathers x[step * q + offset], axes as in the core; sites None: outputs are the inputs.

    halved: offsets up to the zero one are looked up, the zero one being the row itself; the others
    are these pairs read backwards (2.1). It matters to repeated rows only.
    """

    offsets: Offsets
    step: Triple
    sites: Sites | None
    halved: bool = False


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
    unit_step = (1, 1, 1)
    by_hash = kmap_mode == "hashmap"
    if not strided:
        odd = math.prod(kernel) % 2 == 1
        anchor = centred if by_hash or odd else (0, 0, 0)
        return Layer(core_offsets(_shifted(kernel, anchor, unit_step)), unit_step, None, odd and not by_hash)
    offsets = core_offsets(_shifted(kernel, centred if by_hash else padding, unit_step))
    tiled = all(s in (1, k) for s, k in zip(stride, kernel, strict=True))
    if by_hash and (tiled or downsample_mode == "minkowski"):
        return Layer(offsets, stride[::-1], Sites("floor", kernel, stride))
    return Layer(offsets, stride[::-1], Sites("dense", kernel, stride, padding, keep_tail=keep_tail))


def _old_layer(release: str, kernel: Triple, stride: Triple, tensor_stride: Triple) -> Layer:
    """Coordinates stay at the input's resolution, so offsets grow with the tensor stride."""
    unit_step = (1, 1, 1)
    shifts = kernel_offsets(kernel, tensor_stride)
    if max(stride) == 1:
        return Layer(core_offsets(shifts), unit_step, None)
    cell: Triple = tuple(t * s for t, s in zip(tensor_stride, stride, strict=True))  # type: ignore[assignment]
    if all(s in (1, k) for s, k in zip(stride, kernel, strict=True)):
        sites = Sites("cells", kernel, stride, cell=cell, truncate=release == "2.0")
        return Layer(core_offsets(shifts), unit_step, sites)
    reached = shifts
    if release == "2.0" and math.prod(kernel) % 2 == 0:
        # Its candidates for even kernels start at 0, although its map is as ever.
        reached = _shifted(kernel, (0, 0, 0), tensor_stride)
    sites = Sites("reached", kernel, stride, cell=cell, shifts=tuple(reached))
    return Layer(core_offsets(shifts), unit_step, sites)


def _check(kernel: Triple, stride: Triple, padding: Triple) -> None:
    if min(kernel) < 1 or min(stride) < 1 or min(padding) < 0:
        raise GeometryError(
            f"kernel size {kernel}, stride {stride}, padding {padding}; sizes and strides start at 1, padding at 0."
        )
    if math.prod(kernel) > 1 << 16:
        raise OverflowLimitError(f"a kernel of {math.prod(kernel)} offsets; at most 65536 are served.")


def shrunk_range(
    spatial_range: Sequence[int] | None, kernel: Triple, stride: Triple, padding: Triple, keep_tail: bool = False
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


@dataclasses.dataclass(frozen=True)
class Reach:
    """The sites that values reach: scale * u for every whole u = (value - offset) / step, axes as
    in the core."""

    offsets: Offsets
    step: Triple
    scale: Triple = (1, 1, 1)


@functools.lru_cache(maxsize=1024)
def reach_of(sites: Sites) -> Reach:
    """What a rule asks of the core, for values that are not `truncated`."""
    if sites.kind == "dense":
        return Reach(core_offsets(_shifted(sites.kernel, sites.padding, (1, 1, 1))), sites.stride[::-1])
    if sites.kind == "reached":
        back = [(-x, -y, -z) for x, y, z in sites.shifts]
        return Reach(core_offsets(back), sites.cell[::-1], sites.cell[::-1])
    cell = sites.stride if sites.kind == "floor" else sites.cell
    scale = (1, 1, 1) if sites.kind == "floor" else cell[::-1]
    return Reach(core_offsets(_shifted(cell, (0, 0, 0), (1, 1, 1))), cell[::-1], scale)


def truncated(sites: Sites, bounds: Bounds) -> bool:
    """Cells are rounded towards zero from below, which no offset list says."""
    return sites.truncate and min(bounds[0][1:]) < 0


def reach_bounds(sites: Sites, bounds: Bounds, spatial_range: Sequence[int] | None) -> tuple[Bounds, bool]:
    """(bounds of the u of `reach_of`, whether they are exact where `bounds` are).

    bounds: exact where `spatial_range` is None, as the rules ask for extremes of the data.
    """
    low, high, exact = [bounds[0][0]], [bounds[1][0]], sites.kind != "reached"
    for axis in range(3):
        least, most = bounds[0][axis + 1], bounds[1][axis + 1]
        if sites.kind == "dense":
            extent = None if spatial_range is None else int(spatial_range[axis + 1])
            first, last, tight = _dense(sites, axis, least, most, extent)
            exact = exact and tight
        elif sites.kind == "reached":
            cell = sites.cell[axis]
            furthest = max(0, *(shift[axis] for shift in sites.shifts))
            first, last = -(-least // cell), (most + furthest) // cell
        else:
            cell = sites.stride[axis] if sites.kind == "floor" else sites.cell[axis]
            first, last = least // cell, most // cell
        low.append(first)
        high.append(max(first - 1, last))
    return (tuple(low), tuple(high)), exact  # type: ignore[return-value]


def _dense(sites: Sites, axis: int, least: int, most: int, extent: int | None) -> tuple[int, int, bool]:
    """(first, last, whether there are such) q with an offset on a value: value = q * s - pad + t,
    0 <= t < k, inside the dense output."""
    k, s, pad = sites.kernel[axis], sites.stride[axis], sites.padding[axis]
    length = most + 1 if extent is None else extent
    last = (length + 2 * pad - k) // s
    if sites.keep_tail:
        last = max(last, (length - 1 + pad) // s)
    # An axis with negative coordinates extends below 0 as far as they do.
    first = 0 if extent is not None or least >= 0 else (least + pad) // s + 1 - -(-k // s)
    lowest, highest = (-(-(value + pad - k + 1) // s) for value in (least, most))
    # Every value has an offset then, the extreme ones along this axis too.
    exact = extent is None and s <= k and highest <= last and (least + pad) // s >= first
    return max(first, lowest), min(last, (most + pad) // s), exact


@functools.lru_cache(maxsize=1024)
def output_rule(sites: Sites) -> BoxReach:
    """Bounds of the outputs of `sites` over coordinates with exact bounds, as `reach_bounds` has
    them without a range; a rule of requests."""
    axes = tuple(_axis_reach(sites, axis) for axis in (2, 1, 0))
    return BoxReach(axes, sites.kind == "reached" or not all(map(_tight, axes)), sites.truncate)


def _tight(axis: AxisReach) -> bool:
    """Whether the extreme coordinates along an axis, of which each has its cell, lead to the ends
    of what it reaches."""
    return axis.divisor - 1 + axis.first <= axis.last


def _axis_reach(sites: Sites, axis: int) -> AxisReach:
    if sites.kind == "dense":
        k, s, pad = sites.kernel[axis], sites.stride[axis], sites.padding[axis]
        furthest = pad if sites.keep_tail else min(pad, 1 + 2 * pad - k)
        return AxisReach(1, s, pad - k + 1, furthest, True)
    if sites.kind == "reached":
        return AxisReach(1, sites.cell[axis], 0, max(0, *(s[axis] for s in sites.shifts)))
    cell = sites.stride[axis] if sites.kind == "floor" else sites.cell[axis]
    return AxisReach(1, cell, 1 - cell, 0)


def core_box(bounds: Bounds) -> Box:
    """The box of the core around these bounds."""
    low, high = (tuple(bound[column] for column in CORE_COLUMNS) for bound in bounds)
    return Box.spanning(low, tuple(h - lo + 1 for lo, h in zip(low, high, strict=True)))


def box_bounds(box: Box) -> Bounds:
    """The bounds of a box of the core."""
    low = tuple(box.lo[column] for column in CORE_COLUMNS)
    high = tuple(box.lo[column] + box.size[column] - 1 for column in CORE_COLUMNS)
    return low, high  # type: ignore[return-value]


def truncated_bounds(bounds: Bounds) -> Bounds:
    """Bounds of `truncated` cells."""
    low, high = bounds
    return ((low[0], *(min(c, 0) for c in low[1:])), (high[0], *(max(c, 0) for c in high[1:])))  # type: ignore[return-value]


def cell_rows(sites: Sites, coords: torch.Tensor) -> torch.Tensor:
    """The `truncated` cells of rows as in the core, int32 [N, 4]."""
    cell = coords.new_tensor(sites.cell[::-1])
    cells = torch.div(coords[:, 1:], cell, rounding_mode="trunc") * cell
    return torch.cat([coords[:, :1], cells], 1)


def generated_bounds(x: Box, kernel: Triple, stride: Triple) -> Bounds:
    """Bounds of x * stride + kernel offset (2.1)."""
    low, high = box_bounds(x)
    start = [(k - 1) // 2 for k in kernel]
    return (
        (low[0], *(c * s - o for c, s, o in zip(low[1:], stride, start, strict=True))),
        (high[0], *(c * s - o + k - 1 for c, s, o, k in zip(high[1:], stride, start, kernel, strict=True))),
    )  # type: ignore[return-value]


def clamped_rows(coords: torch.Tensor, kernel: Triple, stride: Triple, out_range: Sequence[int]) -> torch.Tensor:
    """Every x * stride + kernel offset, moved into `out_range` where it leaves it (2.1): rows as in
    the core, [N * V, 4], of rows as in the core."""
    shifts = coords.new_tensor(core_offsets(kernel_offsets(kernel)).values)
    reached = coords[:, None, 1:] * coords.new_tensor(stride[::-1]) + shifts
    most = coords.new_tensor([int(extent) - 1 for extent in out_range[3:0:-1]])
    reached = torch.minimum(reached.clamp_(min=0), most)
    batch = coords[:, None, :1].expand(-1, len(shifts), 1)
    return torch.cat([batch, reached], 2).flatten(0, 1)
