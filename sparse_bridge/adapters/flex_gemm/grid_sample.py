"""`grid_sample_3d`: values of sparse voxels at points."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...errors import DeviceError
from ..call_stats import note
from .arguments import check_features, check_tensors
from .errors import ArgumentShapeError, ArgumentValueError, PointTypeError
from .geometry import grid_shape
from .sampling import sampled


def grid_sample_3d(
    feats: torch.Tensor, coords: torch.Tensor, shape: Sequence[int], grid: torch.Tensor, mode: str = "trilinear"
) -> torch.Tensor:
    """Sample voxel features at points; voxel i fills [i, i + 1), its centre is i + 0.5.

    Args:
        feats: [N, C] floating point; differentiable, bitwise repeatable.
        coords: [N, 4] (batch, x, y, z), integers.  shape: (batch, C, S1, S2, S3).
        grid: fp32 [B, L, 3], points in voxels; row b sees the voxels of batch b.
        mode: "trilinear", over the voxels that exist, weights divided by their sum; or "nearest",
            the voxel that contains the point (truncated towards zero). Zeros where there is none.

    Returns: [B, L, C] in feats' dtype.
    Raises: ArgumentShapeError, PointTypeError, ArgumentValueError, DeviceError.
    """
    check_features("grid_sample_3d", feats)
    check_tensors("grid_sample_3d", coords=coords)
    _check(feats, coords, grid, mode)
    batch, channels, extents = grid_shape(shape)
    if channels != feats.shape[1]:
        raise ArgumentValueError(f"grid_sample_3d got {feats.shape[1]} channels, its shape says {channels}.")
    sizes = (batch, *extents)
    if torch.compiler.is_compiling():
        from . import compiled

        return compiled.sampled(feats, coords, sizes, grid, mode)
    note("flex_gemm", "grid_sample_3d")
    return sampled(feats, coords, sizes, grid, mode)


class GridSample3dFunction:
    """The name of FlexGEMM's autograd function; gradients belong to the sampling itself."""

    apply = staticmethod(grid_sample_3d)


def _check(feats: torch.Tensor, coords: torch.Tensor, grid: torch.Tensor, mode: str) -> None:
    if mode not in ("nearest", "trilinear"):
        raise ArgumentShapeError(f"mode is {mode!r}; expected 'nearest' or 'trilinear'.")
    flat = feats.ndim == 2 and coords.ndim == 2 and coords.shape[1] == 4
    if not flat or feats.shape[0] != coords.shape[0]:
        raise ArgumentShapeError(
            f"grid_sample_3d got features {list(feats.shape)} and coordinates "
            f"{list(coords.shape)}; expected [N, C] and [N, 4]."
        )
    check_points("grid_sample_3d", grid)
    if not feats.device == coords.device == grid.device:
        raise DeviceError(
            f"grid_sample_3d got features on {feats.device}, coordinates on {coords.device} and "
            f"points on {grid.device}; move all to one device."
        )


def check_points(caller: str, grid: torch.Tensor) -> None:
    """fp32 [B, L, 3]. Raises ArgumentTypeError, ArgumentShapeError, PointTypeError."""
    check_tensors(caller, grid=grid)
    if grid.ndim != 3 or grid.shape[2] != 3:
        raise ArgumentShapeError(f"{caller} got points of shape {list(grid.shape)}; expected [B, L, 3].")
    if grid.dtype != torch.float32:
        raise PointTypeError(f"{caller} got points of {grid.dtype}; expected torch.float32 (use .float()).")
