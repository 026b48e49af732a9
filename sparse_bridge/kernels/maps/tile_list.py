"""Tiles: a neighbour table permuted so that rows with alike offset masks lie together."""

from __future__ import annotations

import math

import torch

from ...errors import KernelError
from ..runtime.launch import cdiv
from .neighbor_table import NeighborTable

TILE = 64  # rows of the smallest packed tile; the other lists pair them up


class TileList:
    """A neighbour table permuted into tiles of `TILE` rows.

    memory: int32, the views below one after another.  n_rows: rows of the table.  T: tiles, an even
    number.
    """

    tiled = True  # unlike a `NeighborTable`

    def __init__(self, memory: torch.Tensor, n_offsets: int, n_pairs: int, n_rows: int) -> None:
        self.memory, self.n_offsets, self.n_pairs, self.n_rows = memory, n_offsets, n_pairs, n_rows

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """What holds the tiles."""
        return (self.memory,)

    def over(self, memory: torch.Tensor) -> TileList:
        """The same tiles, held by a copy."""
        return TileList(memory, self.n_offsets, self.n_pairs, self.n_rows)

    @staticmethod
    def size(n_offsets: int, n_pairs: int) -> int:
        """Elements of `memory`."""
        quads = cdiv(n_pairs, 4) * 4
        return n_pairs * (2 * TILE * (1 + n_offsets) + n_offsets) + quads * 3 * (n_offsets + 1)

    def _view(self, start: int, *shape: int) -> torch.Tensor:
        return self.memory.narrow(0, start, math.prod(shape)).view(shape)

    @property
    def pitch(self) -> int:
        """T * TILE, places in the tiles."""
        return 2 * TILE * self.n_pairs

    @property
    def rows(self) -> torch.Tensor:
        """[T * TILE]: table row of each place, -1 past the end."""
        return self._view(0, self.pitch)

    @property
    def packed(self) -> torch.Tensor:
        """[V, T * TILE]: the table in the order of `rows`; anything where a pair of tiles lacks the
        offset."""
        return self._view(self.pitch, self.n_offsets, self.pitch)

    def places(self, block_m: int) -> tuple[int, int, int, int]:
        """Where in `memory` packed, rows, and the lists live and n_live for tiles of `block_m` rows
        start; TILE or twice that, else KernelError."""
        if block_m not in (TILE, 2 * TILE):
            raise KernelError(f"tiles of {block_m} rows; packed ones hold {TILE} or {2 * TILE}.")
        v, quads, start = self.n_offsets, cdiv(self.n_pairs, 4) * 4, self._books
        if block_m == TILE:
            return self.pitch, 0, start, start + 3 * quads * v
        return self.pitch, 0, start + 2 * quads * v, start + 3 * quads * v + 2 * quads

    def lists(self, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(live [tiles, V], n_live [tiles]): the offsets present in each tile of `block_m` rows,
        ascending."""
        _, _, live, n_live = self.places(block_m)
        n_tiles = self.n_pairs * 2 * TILE // block_m
        return self._view(live, n_tiles, self.n_offsets), self._view(n_live, n_tiles)

    @property
    def _books(self) -> int:
        return self.pitch * (1 + self.n_offsets)

    @property
    def counts(self) -> torch.Tensor:
        """[V, T / 2]: table entries of every offset in each pair of tiles."""
        start = self._books + cdiv(self.n_pairs, 4) * 4 * 3 * (self.n_offsets + 1)
        return self._view(start, self.n_offsets, self.n_pairs)

    def table(self) -> NeighborTable:
        """The table these tiles were made of."""
        there = self.counts.repeat_interleave(2 * TILE, 1)[:, : self.n_rows] > 0
        packed = torch.where(there, self.packed[:, : self.n_rows], -1)
        rows = self.rows[: self.n_rows].long()
        # Places behind the rows in use have row -1: they go to a column of their own.
        nbr = packed.new_full((self.n_offsets, self.n_rows + 1), -1)
        nbr.index_copy_(1, rows.where(rows >= 0, self.n_rows), packed)
        return NeighborTable(nbr[:, : self.n_rows].contiguous())
