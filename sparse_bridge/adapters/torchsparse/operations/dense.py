"""Dense results: whole grids, and bird's-eye views (one axis goes into channels or weights)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....core.conv.convolution import conv
from ....core.maps import map_cache
from ....core.maps.map_builder import from_pairs
from ....core.ops.dense import to_dense as scattered
from ....core.ops.voxel import voxelize
from ....core.traced import between_graphs
from ....errors import CoordinateError, DataTypeError, GeometryError
from ...call_stats import note
from .. import profile as profiles
from ..conv import allow_tf32
from ..maps import bounds_of
from ..spec import triple
from ..tensors import check_input, check_pair

__all__ = ["dense_convolution", "height_compression", "to_dense"]


def _cells(
    x: Any, coords: torch.Tensor, offset: torch.Tensor, shape: Sequence[int], dim: int, layer_name: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, int, int]]:
    """(cell of each row in the plane, index along `dim`, the same without offset, (B, S_u,
    S_v))."""
    if not 0 <= dim < 3:
        raise GeometryError(f"{layer_name} has dim {dim}; expected 0, 1 or 2.")
    release = profiles.current()
    first = release.first_axis
    stride = torch.tensor(triple(x.stride, "the tensor stride"), device=coords.device)
    sites = coords[:, first : first + 3].long()
    moved = torch.div(sites - offset[0, :3].long(), stride, rounding_mode="floor")
    u, v = (axis for axis in range(3) if axis != dim)
    plane = (int(shape[u]), int(shape[v]))
    batch = coords[:, release.batch_column].long()
    n_items = 0
    if coords.shape[0]:
        columns = torch.stack([batch, moved[:, u], moved[:, v]])
        (low, _, _), (n_items, most_u, most_v) = (columns.amin(1).tolist(), (columns.amax(1) + 1).tolist())
        least = int(moved[:, [u, v]].amin())
        if low < 0 or least < 0 or most_u > plane[0] or most_v > plane[1]:
            raise CoordinateError(
                f"{layer_name}: cells reach ({most_u - 1}, {most_v - 1}), the least is {least}, the "
                f"least batch index {low}; expected cells from 0 on below {plane}. Correct shape "
                "or offset."
            )
    cell = (batch * plane[0] + moved[:, u]) * plane[1] + moved[:, v]
    height = torch.div(sites[:, dim], stride[dim], rounding_mode="floor")
    return cell, moved[:, dim], height, (n_items, *plane)


@between_graphs
def dense_convolution(
    x: Any, kernel: torch.Tensor, bias: torch.Tensor | None, offset: torch.Tensor, shape: torch.Tensor, dim: int
) -> torch.Tensor:
    """[B, C_out, S_u, S_v]: every site times the matrix of its height, summed over its column.

    kernel: [shape[dim], C_in, C_out].  bias: [1, C_out], added once per site.  shape: integers
    [3].
    Raises GeometryError, CoordinateError.
    """
    layer_name = "ToDenseBEVConvolution"
    feats, coords = check_input(x, layer_name)
    cell, _, height, size = _cells(x, coords, offset, shape.tolist(), dim, layer_name)
    n_cells = size[0] * size[1] * size[2]
    if coords.shape[0] and not 0 <= int(height.min()) <= int(height.max()) < kernel.shape[0]:
        raise CoordinateError(
            f"{layer_name}: heights reach {int(height.min())} to {int(height.max())}; the kernel has "
            f"{kernel.shape[0]} of them."
        )
    rows = [(height == h).nonzero().squeeze(1) for h in range(kernel.shape[0])]
    kmap = from_pairs([(r, cell.index_select(0, r)) for r in rows], feats.shape[0], n_cells)
    tf32 = allow_tf32(profiles.current(), feats.device)
    y = conv(feats, kernel, None, kmap, layout="vio", allow_tf32=tf32)
    if bias is not None:
        y = y + torch.bincount(cell, minlength=n_cells).to(y.dtype).unsqueeze(1) * bias.to(y.dtype)
    note("torchsparse", layer_name)
    return y.view(*size, kernel.shape[2]).permute(0, 3, 1, 2).contiguous()


@between_graphs
def height_compression(x: Any, offset: torch.Tensor, shape: torch.Tensor, dim: int) -> torch.Tensor:
    """[B, S_dim * C, S_u, S_v]: channels of a column one above the other, height index major.

    shape: integers [3]; heights outside of it are moved to its ends. Raises GeometryError,
    CoordinateError.
    """
    layer_name = "ToBEVHeightCompression"
    feats, coords = check_input(x, layer_name)
    extents = shape.tolist()
    cell, height, _, (n_items, n_u, n_v) = _cells(x, coords, offset, extents, dim, layer_name)
    n_heights = extents[dim]
    voxel = cell * n_heights + height.clamp(0, n_heights - 1)
    ones = torch.ones(n_items * n_u * n_v * n_heights, dtype=torch.int32, device=feats.device)
    y = voxelize(feats, voxel, ones).view(n_items, n_u, n_v, n_heights, feats.shape[1])
    note("torchsparse", layer_name)
    return y.permute(0, 3, 4, 1, 2).reshape(n_items, n_heights * feats.shape[1], n_u, n_v)


@between_graphs
def to_dense(feats: torch.Tensor, coords: torch.Tensor, spatial_range: Sequence[int]) -> torch.Tensor:
    """[B, X, Y, Z, C] with the features at their coordinates and zeros elsewhere; differentiable.

    feats: [N, C].  coords: int32 [N, 4] as [b, x, y, z]; of equal ones the last row stays.
    spatial_range: (B, X, Y, Z).
    Raises ShapeError, DataTypeError, DeviceError, GeometryError, CoordinateError.
    """
    coords = check_pair(feats, coords, "to_dense")
    if isinstance(spatial_range, str) or not hasattr(spatial_range, "__len__"):
        raise DataTypeError(f"spatial_range is {spatial_range!r}; expected (B, X, Y, Z).")
    shape = tuple(int(n) for n in spatial_range[:4])
    if len(shape) < 4 or min(shape) < 0:
        raise GeometryError(f"spatial_range is {tuple(spatial_range)}; expected (B, X, Y, Z).")
    low, high = bounds_of(map_cache.store_of(coords), coords, profiles.PROFILES["2.1"])
    for name, least, most, extent in zip("bxyz", low, high, shape, strict=True):
        if most >= least and (least < 0 or most >= extent):
            wrong = least if least < 0 else most
            raise CoordinateError(f"to_dense: column {name} holds {wrong}; the grid {shape} takes 0 <= c < {extent}.")
    return scattered(feats, coords, shape, channels_first=False, last_wins=True)
