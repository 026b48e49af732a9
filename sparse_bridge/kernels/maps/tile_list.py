"""Tiles: a neighbour table permuted so that rows with alike offset masks lie together."""

from __future__ import annotations

import math

import torch

from ...errors import KernelError
from ..runtime.launch import cdiv
from .neighbor_table import NeighborTable

TILE = 64  # rows of the smallest packed tile; the other lists pair them up


def shared_by(block_m: int) -> int:
    """Programs of `block_m` rows that share a list of live offsets."""
    return max(1, TILE // block_m)


class TileList:
    """A neighbour table permuted into tiles of `TILE` rows.

    memory: int32 [size], the views below one after another.  n_offsets: V.  n_pairs: pairs of tiles of
    a part, T / 2.  n_rows: rows of the table, N.  splits: parts, S, each with all rows in an order of
    its own and with the offsets from part * V // S on, see `mask_order`.
    """

    tiled = True  # unlike a `NeighborTable`

    def __init__(self, memory: torch.Tensor, n_offsets: int, n_pairs: int, n_rows: int, splits: int = 1) -> None:
        self.memory, self.n_offsets, self.n_pairs, self.n_rows = memory, n_offsets, n_pairs, n_rows
        self.splits = splits

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """What holds the tiles: `memory`, int32 [size]."""
        return (self.memory,)

    @property
    def nbytes(self) -> int:
        """Bytes of all tiles."""
        return self.memory.nbytes

    @staticmethod
    def size(n_offsets: int, n_pairs: int, splits: int = 1) -> int:
        """Elements of `memory`."""
        quads = cdiv(splits * n_pairs, 4) * 4
        per_pair = 2 * TILE * (splits + n_offsets + splits - 1)
        return n_pairs * (per_pair + n_offsets) + quads * 3 * (n_offsets + 1)

    def _view(self, start: int, *shape: int) -> torch.Tensor:
        return self.memory.narrow(0, start, math.prod(shape)).view(shape)

    @property
    def pitch(self) -> int:
        """T * TILE, places in the tiles of a part."""
        return 2 * TILE * self.n_pairs

    @property
    def rows(self) -> torch.Tensor:
        """int32 [S * T * TILE]: table row of each place, plus N for every part before; -1 past the end."""
        return self._view(0, self.splits * self.pitch)

    @property
    def packed(self) -> torch.Tensor:
        """int32 [V + S - 1, T * TILE]: the table in the order of `rows`, offset v of part p at v + p;
        anything where a pair of tiles lacks the offset. So element v * pitch + place is where it
        would be in a table whose places run on from part to part."""
        lines = self.n_offsets + self.splits - 1
        return self._view(self.packed_at, lines, self.pitch)

    @property
    def packed_at(self) -> int:
        """Where in `memory` the packed table starts."""
        return self._starts()[0]

    def section_starts(self, block_m: int) -> tuple[int, int, int, int]:
        """Where in `memory` packed, rows, and the lists live and n_live for programs of `block_m`
        rows start; a part of TILE, TILE or twice that, else KernelError. Twin in C: `places`."""
        if block_m != 2 * TILE and TILE % block_m:
            raise KernelError(
                f"programs of {block_m} rows; packed tiles hold {TILE} or {2 * TILE}, and smaller "
                f"programs a part of {TILE}."
            )
        (packed, start, quads), v = self._starts(), self.n_offsets
        if block_m <= TILE:
            return packed, 0, start, start + 3 * quads * v
        return packed, 0, start + 2 * quads * v, start + 3 * quads * v + 2 * quads

    def _starts(self) -> tuple[int, int, int]:
        """(where in `memory` the packed table starts, where the lists do, pairs of tiles that those
        have room for). One call: every product asks over every new map."""
        splits, n_pairs = self.splits, self.n_pairs
        pitch = 2 * TILE * n_pairs
        packed = splits * pitch
        return packed, packed + pitch * (self.n_offsets + splits - 1), cdiv(splits * n_pairs, 4) * 4

    def lists(self, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(live int32 [tiles, V], n_live int32 [tiles]): the offsets present in each tile of each part,
        ascending; tiles of TILE rows, or of twice that where `block_m` is. Only the first n_live offsets of
        a tile mean something. Raises KernelError as `section_starts` does."""
        _, _, live, n_live = self.section_starts(block_m)
        n_tiles = self.splits * self.pitch // max(TILE, block_m)
        return self._view(live, n_tiles, self.n_offsets), self._view(n_live, n_tiles)

    @property
    def counts(self) -> torch.Tensor:
        """int32 [V, T / 2]: table entries of every offset in each pair of tiles of its part."""
        return self._view(self.counts_at, self.n_offsets, self.n_pairs)

    @property
    def counts_at(self) -> int:
        """Where in `memory` the counts start."""
        _, start, quads = self._starts()
        return start + quads * 3 * (self.n_offsets + 1)

    def table(self) -> NeighborTable:
        """The table these tiles were made of."""
        n_rows, n_offsets = self.n_rows, self.n_offsets
        live = self.counts.repeat_interleave(2 * TILE, 1)[:, :n_rows] > 0
        # Places behind the rows in use have row -1: they go to a column of their own.
        nbr = self.memory.new_full((n_offsets, n_rows + 1), -1)
        for part in range(self.splits):
            start, end = part * n_offsets // self.splits, (part + 1) * n_offsets // self.splits
            named = self.rows[part * self.pitch :][:n_rows].long()
            rows = torch.where(named >= 0, named - part * n_rows, n_rows)
            packed = self.packed[start + part : end + part, :n_rows]
            nbr[start:end].index_copy_(1, rows, torch.where(live[start:end], packed, -1))
        return NeighborTable(nbr[:, :n_rows].contiguous())
