"""Sums, means and maxima of the rows of every batch item, where only the device knows how many rows there are.

Nothing is added atomically: every program takes a share of the rows, and a second launch joins the shares in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..maps.coord_key import live_rows
from ..runtime.launch import alignment, cdiv, power_of_2, register
from ..runtime.parts import Operand
from ..runtime.target import Target

MODES = ("sum", "avg", "max")
_ROWS, _MOST_CHANNELS, _SHARES = 32, 64, 128
OPTIONS = {"num_warps": 4}


@triton.jit(do_not_specialize=["count_ptr", "n_rows", "n_channels", "pitch"])
def _item_shares(
    x_ptr,
    item_ptr,
    count_ptr,
    share_ptr,
    total_ptr,
    n_rows,
    n_channels,
    pitch,
    MAX: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """grid: (shares, blocks of channels, items). x [n_rows, n_channels]; item int32, `pitch` apart; share fp32
    [items, shares, n_channels]; total int32 [items, shares]: rows of the item in each share."""
    item, channel = tl.program_id(2), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    ok_c = channel < n_channels
    acc = tl.full((CHANNELS,), float("-inf") if MAX else 0.0, tl.float32)
    n_used = live_rows(count_ptr, n_rows, 1)
    total = tl.full((), 0, tl.int32)
    for begin in range(tl.program_id(0) * ROWS, n_used, tl.num_programs(0) * ROWS):
        row = begin + tl.arange(0, ROWS)
        own = tl.load(item_ptr + row.to(tl.int64) * pitch, mask=row < n_used, other=-1) == item
        at = row.to(tl.int64)[:, None] * n_channels + channel[None, :]
        value = tl.load(x_ptr + at, mask=own[:, None] & ok_c[None, :], other=float("-inf") if MAX else 0.0)
        value = value.to(tl.float32)
        if MAX:
            odd = tl.max((value != value).to(tl.int32), 0) != 0  # NaN stays
            most = tl.maximum(acc, tl.max(value, 0), propagate_nan=tl.PropagateNan.ALL)
            acc = tl.where(odd, float("nan"), most)
        else:
            acc += tl.sum(value, 0)
        total += tl.sum(own.to(tl.int32), 0)
    place = item.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(share_ptr + place * n_channels + channel, acc, mask=ok_c)
    tl.store(total_ptr + place, total)


@triton.jit(do_not_specialize=["n_shares", "n_channels"])
def _item_joined(
    share_ptr, total_ptr, y_ptr, n_shares, n_channels, MODE: tl.constexpr, CHANNELS: tl.constexpr, SHARES: tl.constexpr
):
    """grid: (blocks of channels, items). y [items, n_channels]; 0 for an item without rows."""
    item, channel = tl.program_id(1).to(tl.int64), tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    ok_c = channel < n_channels
    share = tl.arange(0, SHARES)
    total = tl.sum(tl.load(total_ptr + item * n_shares + share, mask=share < n_shares, other=0), 0)
    acc = tl.full((CHANNELS,), float("-inf") if MODE == "max" else 0.0, tl.float32)
    for one in range(n_shares):
        value = tl.load(share_ptr + (item * n_shares + one) * n_channels + channel, mask=ok_c, other=0.0)
        if MODE == "max":
            acc = tl.maximum(acc, value, propagate_nan=tl.PropagateNan.ALL)
        else:
            acc += value
    if MODE == "avg":
        acc = tl.div_rn(acc, tl.maximum(total, 1).to(tl.float32))
    acc = tl.where(total > 0, acc, 0.0)
    tl.store(y_ptr + item * n_channels + channel, acc.to(y_ptr.dtype.element_ty), mask=ok_c)


shares_kernel = register(_item_shares)
joined_kernel = register(_item_joined)


def item_pool(
    x: torch.Tensor, items: torch.Tensor, count: Operand, n_items: int, mode: str, target: Target
) -> torch.Tensor:
    """[n_items, C] in x's dtype: sum, mean or maximum of the rows of every item, 0 of an item without rows.

    x: fp16, bf16 or fp32 [N, C], contiguous.  items: int32 [N], perhaps a column; others take no part.  count: int32
    [1] on the device, one less than the rows in use.
    """
    n_rows, n_channels = x.shape
    channels = min(power_of_2(n_channels), _MOST_CHANNELS)
    n_shares = min(_SHARES, cdiv(n_rows, _ROWS))
    shares = torch.empty((n_items, n_shares, n_channels), dtype=torch.float32, device=x.device)
    totals = torch.empty((n_items, n_shares), dtype=torch.int32, device=x.device)
    y = x.new_empty((n_items, n_channels))
    constants: tuple[object, ...] = (mode == "max", _ROWS, channels)
    blocks = cdiv(n_channels, channels)
    shares_kernel.launch(
        x.device,
        target,
        (n_shares, blocks, n_items),
        (x, items, count, shares, totals, n_rows, n_channels, items.stride(0)),
        constants,
        OPTIONS,
        (constants, x.dtype, alignment(x, items, shares, totals)),
    )
    constants = (mode, channels, _SHARES)
    joined_kernel.launch(
        x.device,
        target,
        (blocks, n_items, 1),
        (shares, totals, y, n_shares, n_channels),
        constants,
        OPTIONS,
        (constants, y.dtype, alignment(shares, totals, y)),
    )
    return y
