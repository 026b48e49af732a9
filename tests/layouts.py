"""The same values in every layout that torch allows."""

from __future__ import annotations

import torch


def layouts(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """x as it is, and in other layouts by name: axes in another order in memory, rows with gaps between them, a part
    of larger memory."""
    n, found = x.ndim, {"as it is": x.clone()}
    orders = {
        "axes reversed": [*range(n - 1, -1, -1)],
        "last axis first": [n - 1, *range(n - 1)],
        "first axis last": [*range(1, n), 0],
        "inner axes reversed": [0, *range(n - 2, 0, -1), n - 1],
    }
    for name, order in orders.items():
        if n > 1 and sorted(order) == [*range(n)]:
            back = [order.index(axis) for axis in range(n)]
            found[name] = x.permute(order).contiguous().permute(back)
    if n in (4, 5):
        found["channels last"] = x.contiguous(memory_format=torch.channels_last if n == 4 else torch.channels_last_3d)
    for axis in range(n):
        wide = x.repeat_interleave(2, axis)
        found[f"every second along {axis}"] = wide[(slice(None),) * axis + (slice(None, None, 2),)]
        found[f"part along {axis}"] = torch.cat([x, x], axis).narrow(axis, x.shape[axis], x.shape[axis])
    return found


def expanded(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """One entry along each axis, for all of it: memory that overlaps itself. The values are others than x's."""
    return {f"expanded along {axis}": x.narrow(axis, 0, 1).expand_as(x) for axis in range(x.ndim)}
