"""Shapes, kernel offsets and output grids of FlexGEMM's layers.

A shape is (batch, channels, S1, S2, S3). Axis i of it belongs to column i of the coordinates, axis
i of the weight [C_out, k1, k2, k3, C_in] and entry i of kernel size, stride, padding and dilation.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...core.geometry.boxes import Box
from ...core.geometry.offsets import Offsets, box_offsets
from .arguments import check_tensors, per_axis, shape_entries
from .arguments import kernel_size as kernel_sizes
from .errors import ArgumentShapeError, ArgumentTypeError, ArgumentValueError

Triple = tuple[int, int, int]


def triple(value: Any, name: str, least: int) -> Triple:
    """Three integers from a sequence of three, or one for all axes. Raises ArgumentTypeError,
    ArgumentValueError."""
    return per_axis(value, 3, name, least)  # type: ignore[return-value]


def grid_shape(shape: Sequence[int]) -> tuple[int, int, Triple]:
    """(batch size, channels, extents) of a five-entry shape. Raises ArgumentTypeError,
    ArgumentValueError."""
    batch, channels, *extents = shape_entries(shape, 5, "five entries (batch, channels, S1, S2, S3)")
    return batch, channels, tuple(extents)  # type: ignore[return-value]


def box_of(batch: int, extents: Sequence[int]) -> Box:
    """The cells of a grid; rows outside have no neighbours."""
    return Box.spanning((0,) * (1 + len(extents)), (batch, *extents))


def bounds_of(coords: torch.Tensor) -> Box:
    """The bounds of coordinates [N, 1 + D]; waits for the device."""
    if coords.shape[0] == 0:
        return box_of(0, (0,) * (coords.shape[1] - 1))
    lo, hi = torch.stack(coords.aminmax(dim=0)).tolist()
    return Box.spanning(tuple(lo), tuple(h - low + 1 for low, h in zip(lo, hi, strict=True)))


def row_major(coords: torch.Tensor, box: Box) -> torch.Tensor:
    """Distinct rows of a box that starts at zero, in ascending order."""
    if box.oversized:
        return torch.unique(coords, dim=0)
    key = coords[:, 0].long()
    for axis in range(1, coords.shape[1]):
        key = key * box.size[axis] + coords[:, axis]
    return coords.index_select(0, torch.argsort(key))


def check_coords(coords: torch.Tensor, caller: str) -> torch.Tensor:
    """int32 [N, 4]. Raises ArgumentShapeError, ArgumentTypeError."""
    check_tensors(caller, coords=coords)
    if coords.ndim != 2 or coords.shape[1] != 4:
        raise ArgumentShapeError(
            f"{caller} got coordinates of shape {list(coords.shape)}; expected [N, 4] (batch, x, y, z)."
        )
    if coords.dtype != torch.int32:
        raise ArgumentTypeError(f"{caller} got coordinates of {coords.dtype}; expected torch.int32 (use .int()).")
    return coords


def check_rows(feats: torch.Tensor, coords: torch.Tensor, caller: str) -> None:
    """`check_coords`, one for each row of features."""
    check_coords(coords, caller)
    if feats.shape[0] != coords.shape[0]:
        raise ArgumentShapeError(f"{caller} got {feats.shape[0]} rows of features and {coords.shape[0]} coordinates.")


def same_offsets(kernel: Triple, dilation: Triple) -> Offsets:
    """Offsets (t - k // 2) * d, last axis fastest. Raises ArgumentValueError for even sizes."""
    if any(k % 2 == 0 for k in kernel):
        raise ArgumentValueError(
            f"a submanifold kernel of size {kernel}; every size must be odd (use sparse_conv3d for even kernels)."
        )
    origin = tuple(k // 2 * d for k, d in zip(kernel, dilation, strict=True))
    return box_offsets(kernel, dilation, origin)


class Strided(NamedTuple):
    """y[q] gathers x[q * stride - padding + t * dilation], 0 <= t < kernel."""

    kernel: Triple
    stride: Triple
    padding: Triple
    dilation: Triple

    @classmethod
    def of(cls, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Strided:
        """Each three integers, or one for all axes. Raises ArgumentTypeError,
        ArgumentValueError."""
        steps = triple(stride, "stride", 1), triple(padding, "padding", 0)
        return cls(kernel_sizes(kernel, 3), *steps, triple(dilation, "dilation", 1))  # type: ignore[arg-type]

    @property
    def offsets(self) -> Offsets:
        """t * dilation - padding, last axis fastest."""
        return _shifted(self)

    def extents(self, extents: Triple) -> Triple:
        """Output extents floor((S + 2p - d(k - 1) - 1) / s) + 1, at least 0."""
        sizes = []
        for s, k, step, p, d in zip(extents, *self, strict=True):
            sizes.append(max(0, (s + 2 * p - d * (k - 1) - 1) // step + 1))
        return tuple(sizes)  # type: ignore[return-value]

    def output_box(self, box: Box) -> Box:
        """The output grid behind the grid `box`; a rule of requests."""
        return box_of(box.size[0], self.extents(box.size[1:]))  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1024)
def _shifted(layer: Strided) -> Offsets:
    return box_offsets(layer.kernel, layer.dilation, layer.padding)
