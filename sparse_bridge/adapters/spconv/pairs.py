"""Kernel maps as spconv's pair tensors, and back.

`indice_pairs` int32 [2, V, N] of (input, output) rows padded with -1 plus `indice_pair_num` [V], or
tables `pair_fwd` int32 [V, M] with -1 for absent. Kernel maps made from them are remembered as long
as the tensors live.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ... import state
from ...core.arguments import expect_tensors
from ...core.maps.kernel_map import KernelMap, dense_table, row_pairs
from ...core.maps.map_builder import from_pairs
from ...errors import ShapeError
from .rules.switches import sorts_masks

_maps: WeakIdKeyDictionary = WeakIdKeyDictionary()
_lock = threading.Lock()


@state.owns
def reset() -> None:
    """Forget the maps of pair lists and tables: they are made again."""
    with _lock:
        _maps.clear()


def indice_pairs(kmap: KernelMap, n_in: int, is_subm: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Pair lists as spconv lays them out.

    Returns pairs int32 [2, V, n_in] of (input, output) rows padded with -1, and counts int32 [V]; a
    submanifold layer counts only the offsets before the centre, the mirrored ones reuse those.
    """
    n_offsets = kmap.n_offsets
    pairs = torch.full((2, n_offsets, n_in), -1, dtype=torch.int32, device=kmap.device)
    counts = torch.zeros(n_offsets, dtype=torch.int32)
    for v in range(n_offsets):
        x_rows, y_rows = row_pairs(kmap, v)
        pairs[0, v, : x_rows.shape[0]] = x_rows
        pairs[1, v, : y_rows.shape[0]] = y_rows
        if not is_subm or v < n_offsets // 2:
            counts[v] = x_rows.shape[0]
    return pairs, counts.to(kmap.device)


def masks_and_order(table: torch.Tensor, sort: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Which kernel offsets each row has, and the rows ordered by that.

    sort: False leaves the rows as they are; None: `SPCONV_DO_SORT`.

    Returns masks int32 [rows, ceil(V / 32)], bit v % 32 of word v // 32 set where offset v is
    present, and the row order int32 [rows] by the first word.
    """
    width = -(-table.shape[0] // 32)
    present = torch.nn.functional.pad((table >= 0).long(), (0, 0, 0, 32 * width - table.shape[0]))
    weights = torch.bitwise_left_shift(torch.tensor(1), torch.arange(32)).to(table.device)
    words = (present.view(width, 32, -1) * weights[None, :, None]).sum(1)
    masks = torch.where(words >= 1 << 31, words - (1 << 32), words).int().t().contiguous()
    if not (sorts_masks() if sort is None else sort):
        return masks, torch.arange(len(masks), dtype=torch.int32, device=masks.device)
    return masks, torch.argsort(masks[:, 0], stable=True).int()


def tables_of(kmap: KernelMap) -> tuple[torch.Tensor, torch.Tensor]:
    """(pair_fwd [V, M], pair_bwd [V, N]) of a map."""
    return dense_table(kmap, 0), dense_table(kmap, 1)


def counts_of(pair_fwd: torch.Tensor) -> torch.Tensor:
    """Present inputs of every output row, int32 [M]."""
    return (pair_fwd >= 0).sum(0, dtype=torch.int32)


def global_pool_rearrange(coords: torch.Tensor, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows by batch item: int32 [batch_size, N], padded with -1, and counts int32 [batch_size]."""
    batch = coords[:, 0].long()
    valid = (batch >= 0) & (batch < batch_size)
    order = torch.sort(torch.where(valid, batch, batch_size), stable=True).indices
    counts = torch.bincount(batch[valid], minlength=batch_size)
    starts = counts.cumsum(0) - counts
    rows = torch.full((batch_size, coords.shape[0]), -1, dtype=torch.int32, device=coords.device)
    live = order[: int(counts.sum())]
    column = torch.arange(live.shape[0], device=coords.device) - starts[batch[live]]
    rows[batch[live], column] = live.int()
    return rows, counts.int()


def _remember(tensor: torch.Tensor, key: Any, build: Any) -> KernelMap:
    expect_tensors("the convolution", pairs=tensor)
    stamp = (tensor.data_ptr(), None if tensor.is_inference() else tensor._version)
    with _lock:
        entries = _maps.get(tensor)
        if entries is None or entries[0] != stamp:
            entries = _maps[tensor] = (stamp, {})
        if key not in entries[1]:
            entries[1][key] = build()
        return entries[1][key]


def map_from_pairs(
    pairs: torch.Tensor, counts: torch.Tensor, n_in: int, n_out: int, subm: bool = False, inverse: bool = False
) -> KernelMap:
    """pairs [2, V, N] and counts [V] -> kernel map of n_in to n_out rows.

    subm: counts cover the first half of the offsets only; the centre pairs every row with itself.
    inverse: the pairs are read backwards.  Raises ShapeError.
    """
    if inverse:
        return map_from_pairs(pairs, counts, n_out, n_in, subm).transposed()
    if pairs.ndim != 3 or pairs.shape[0] != 2 or counts.shape != (pairs.shape[1],):
        raise ShapeError(
            f"indice_pairs {list(pairs.shape)} with counts {list(counts.shape)}; expected [2, V, N] and [V]."
        )

    def build() -> KernelMap:
        numbers, n_offsets = counts.tolist(), counts.shape[0]
        lists = []
        for v in range(n_offsets):
            if subm and v == n_offsets // 2:
                every = torch.arange(n_in, device=pairs.device)
                lists.append((every, every))
                continue
            mirrored = subm and v > n_offsets // 2
            length = numbers[n_offsets - 1 - v] if mirrored else numbers[v]
            lists.append((pairs[0, v, :length], pairs[1, v, :length]))
        return from_pairs(lists, n_in, n_out)

    return _remember(pairs, ("pairs", n_in, n_out, subm), build)


def map_from_table(pair_fwd: torch.Tensor, n_in: int, n_out: int) -> KernelMap:
    """pair_fwd [V, M] (input row of every output row, -1 absent) -> kernel map."""

    def build() -> KernelMap:
        lists = []
        for column in pair_fwd:
            rows = (column[:n_out] >= 0).nonzero().squeeze(1)
            lists.append((column.index_select(0, rows), rows))
        return from_pairs(lists, n_in, n_out)

    return _remember(pair_fwd, ("table", n_in, n_out), build)
