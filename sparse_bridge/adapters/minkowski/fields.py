"""Point fields: float coordinates of a manager, and where each point lies on a map."""

from __future__ import annotations

import torch

from ...errors import CoordinateError

__all__ = ["FieldMap", "integral"]

_INT32 = torch.iinfo(torch.int32)


def integral(coords: torch.Tensor) -> torch.Tensor:
    """Coordinates of any dtype as int32, floored. Raises CoordinateError where they do not fit."""
    if coords.dtype == torch.int32:
        return coords
    floored = torch.floor(coords.double()) if coords.is_floating_point() else coords.long()
    fits = (floored >= _INT32.min) & (floored <= _INT32.max)
    if not bool(fits.all()):
        bad = coords[~fits.all(1)][0].tolist()
        raise CoordinateError(
            f"the coordinate {bad} is not finite or leaves 32-bit integers; "
            "shift or coarsen the coordinates."
        )
    return floored.int()


class FieldMap:
    """Coordinates [N, 1 + D] of points, batch first.

    coords: float32, as the manager shows them.  exact: the integers behind them if they were
    integers, so that large ones keep every digit.  rows: rows on maps made from this field, by key.
    """

    def __init__(self, coords: torch.Tensor, stride: tuple[int, ...]) -> None:
        self.exact = None if coords.is_floating_point() else coords.detach().clone()
        self.coords = coords.detach().to(torch.float32, copy=True)
        self.stride = stride
        self.rows: dict[tuple[tuple[int, ...], str], torch.Tensor] = {}

    def cells(self, stride: tuple[int, ...]) -> torch.Tensor:
        """int32 [N, 1 + D]: every point rounded down to multiples of `stride`, its batch index to
        the nearest integer. Raises CoordinateError."""
        coords = self.coords.double() if self.exact is None else self.exact.long()
        step = coords.new_tensor([max(1, s) for s in stride])
        axes = torch.div(coords[:, 1:], step, rounding_mode="floor") * step
        return integral(torch.cat([coords[:, :1].round(), axes], 1))

    def batches(self) -> torch.Tensor:
        """Batch indices present, ascending int64. Raises CoordinateError for a negative one."""
        found = torch.unique(self.coords[:, 0].round()).long()
        if found.shape[0] and int(found[0]) < 0:
            raise CoordinateError(f"batch index {int(found[0])}; batch indices must be 0 or more.")
        return found
