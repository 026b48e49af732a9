"""A sparse tensor of no framework: what every adapter's `to_core` returns and `from_core` takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ...errors import CoordinateError, DataTypeError, DeviceError, GeometryError, ShapeError

_INT32 = torch.iinfo(torch.int32)


def brief(tensor: Any) -> str:
    """Shape, dtype and device of a tensor or an array: `[300, 4] float32 cpu`. Of anything else its kind. Reads no
    value."""
    if not (hasattr(tensor, "dtype") and hasattr(tensor, "shape")):
        return type(tensor).__name__
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{list(tensor.shape)} {dtype} {getattr(tensor, 'device', '')}".rstrip()


def check_multiples(cells: torch.Tensor, step: tuple[int, ...]) -> None:
    """Raises CoordinateError unless `step` times the axes of int32 cells [N, 1 + D] fit into int32. Waits for the
    device."""
    wide = cells[:, 1:].long() * torch.tensor(step, device=cells.device)
    wrong = ((wide < _INT32.min) | (wide > _INT32.max)).any(1)
    if bool(wrong.any()):
        bad = [int(cells[wrong][0, 0]), *wide[wrong][0].tolist()]
        raise CoordinateError(
            f"the coordinate {bad} on tensor stride {list(step)} leaves 32-bit integers; shift the input's "
            "coordinates, or use a smaller stride."
        )


def check_bounds(
    low: Sequence[int], high: Sequence[int], shape: Sequence[int] | None, batch_size: int | None, advice: str
) -> None:
    """Raises: CoordinateError, which ends in `advice`, for coordinates from `low` to `high`, [1 + D] each, that leave
    a batch size or a grid. None: any, but for a batch index below zero."""
    axes: Sequence[int | None] = shape or [None] * (len(low) - 1)
    limits: list[int | None] = [batch_size, *axes]
    for column, (least, most, limit) in enumerate(zip(low, high, limits, strict=True)):
        bounded = limit is not None or column == 0
        wrong = least if bounded and least < 0 else most
        if (bounded and least < 0) or (limit is not None and most >= limit):
            name = "a batch index" if column == 0 else f"a coordinate along axis {column - 1}"
            upper = "0 or more" if limit is None else f"0 <= c < {limit}" if limit else "none, as batch_size is 0"
            raise CoordinateError(f"{name} is {wrong}; expected {upper}. {advice}")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class SparseData:
    """Features at integer cells of one grid.

    feats: [N, C], any dtype; keeps its autograd history.
    coords: int32 [N, 1 + D], batch first, row-aligned with `feats`, in cells of this tensor's own
        grid: a framework that stores multiples of the tensor stride divides by it.
    tensor_stride: [D], spacing of that grid in cells of the network's input grid.
    spatial_shape: [D], the cells are 0 <= c < shape; None where the framework has no bounds.
    batch_size: items 0 .. batch_size - 1, empty ones included; None where nobody says.

    Raises: ShapeError, DataTypeError, DeviceError, GeometryError, CoordinateError.
    """

    feats: torch.Tensor
    coords: torch.Tensor
    tensor_stride: tuple[int, ...]
    spatial_shape: tuple[int, ...] | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        feats, coords = self.feats, self.coords
        if feats.ndim != 2 or coords.ndim != 2 or feats.shape[0] != coords.shape[0]:
            raise ShapeError(
                f"features {list(feats.shape)} and coordinates {list(coords.shape)}; "
                "expected [N, C] and [N, 1 + D] with equal N."
            )
        if coords.dtype != torch.int32:
            raise DataTypeError(f"coordinates are {coords.dtype}; expected torch.int32 (use .int()).")
        if feats.device != coords.device:
            raise DeviceError(f"features on {feats.device}, coordinates on {coords.device}; move both to one device.")
        for name in ("tensor_stride", "spatial_shape"):
            value = getattr(self, name)
            if value is not None and len(value) != self.dimension:
                raise GeometryError(
                    f"{name} {list(value)} for {self.dimension}-dimensional coordinates; one entry per axis is needed."
                )
        if self.batch_size is not None and self.batch_size < 0:
            raise CoordinateError(f"batch_size is {self.batch_size}; it cannot be negative.")

    def __repr__(self) -> str:
        parts = [f"feats={brief(self.feats)}", f"coords={brief(self.coords)}"]
        for name in ("tensor_stride", "spatial_shape", "batch_size"):
            value = getattr(self, name)
            parts += [] if value is None else [f"{name}={value}"]
        return f"SparseData({', '.join(parts)})"

    @property
    def dimension(self) -> int:
        """D."""
        return self.coords.shape[1] - 1

    def check_inside(self, spatial_shape: Sequence[int] | None, batch_size: int | None) -> None:
        """Raises: CoordinateError for rows outside of bounds that somebody else gave. Waits for the device."""
        if len(self.coords):
            low, high = (bound.tolist() for bound in self.coords.aminmax(dim=0))
            check_bounds(low, high, spatial_shape, batch_size, "Drop such rows, or give bounds that hold them.")
