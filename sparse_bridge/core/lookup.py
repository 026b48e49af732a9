"""Finding single coordinates in a coordinate map."""

from __future__ import annotations

import torch

from .conv_spec import Offsets
from .coordinate_map import CoordinateMap
from .map_builder import search_of

__all__ = ["find_rows"]

_INT32 = torch.iinfo(torch.int32)


def find_rows(cmap: CoordinateMap, query: torch.Tensor) -> torch.Tensor:
    """Row of every queried coordinate, -1 where it is absent: int64 [M].

    cmap: distinct coordinates.  query: [M, 1 + D], batch first; int64 may leave the 32-bit range.
    """
    inside = (query >= _INT32.min) & (query <= _INT32.max)
    coords = query.clamp(_INT32.min, _INT32.max).int().contiguous()
    target = cmap.kernel_target()
    if target is None or coords.shape[0] == 0:
        rows = _host_rows(cmap, coords)
    else:
        from ..kernels.neighbor_table import neighbor_lookup

        one = (1,) * cmap.box.dimension
        geometry = Offsets.of([(0,) * cmap.box.dimension]).geometry(cmap.device, one, one, 1)
        bounds = cmap.box.bounds(cmap.device)
        table = neighbor_lookup(
            cmap.table(target), cmap.n_rows, coords, geometry, bounds, None, 1, -1, False, target
        )
        rows = table.nbr[0].long()
    return rows if query.dtype == torch.int32 else torch.where(inside.all(1), rows, -1)


def _host_rows(cmap: CoordinateMap, coords: torch.Tensor) -> torch.Tensor:
    zero = Offsets.of([(0,) * cmap.box.dimension])
    stride = (1,) * cmap.box.dimension
    found = search_of(cmap.box, zero).lookup(cmap.host(), coords, None, zero, stride)
    rows = torch.full((coords.shape[0],), -1, dtype=torch.int64, device=coords.device)
    rows[found.out_rows] = found.in_rows
    return rows
