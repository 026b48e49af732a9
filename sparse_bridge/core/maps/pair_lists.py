"""Pairs of rows that meet at the offsets of a kernel, offset by offset."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import NamedTuple

import numpy as np
import torch

from ..geometry.host_cells import Array, Rows32, on_device


class ShortPairs(NamedTuple):
    """Pairs on the host as the CPU's dataflow reads them.

    in_rows, out_rows: int32 [P], list after list.  counts: pairs of each list.  dense: the list in
    which every one of `n_rows` rows meets itself, which is left out; -1: none.
    """

    in_rows: Rows32
    out_rows: Rows32
    counts: list[int]
    dense: int = -1
    n_rows: int = 0


class PairLists:
    """(in row, out row) pairs grouped by offset, each group ascending in its out or in rows.

    in_rows, out_rows: int64 [P] (torch scatters much faster by int64 on CPUs).  starts: host
    integers [L + 1]; list v is [starts[v], starts[v + 1]). mirrored: lists of offsets 0..V/2 only;
    offset V - 1 - v has those of v with in and out swapped.  short: the same, where the host made
    it for the CPU; the rest is then made of it when asked for.
    """

    short: ShortPairs | None = None
    mirrored: bool

    def __init__(self, in_rows: torch.Tensor, out_rows: torch.Tensor, starts: list[int], mirrored: bool) -> None:
        self.__dict__.update(in_rows=in_rows, out_rows=out_rows, starts=starts, mirrored=mirrored)

    @staticmethod
    def of(short: ShortPairs, mirrored: bool, device: torch.device) -> PairLists:
        """The lists of `short` on `device`."""
        lists = PairLists.__new__(PairLists)
        lists.short, lists.mirrored = short, mirrored
        if device.type == "cpu":
            return lists
        in_rows, out_rows = (on_device(_with_dense(part, short), device) for part in short[:2])
        return PairLists(in_rows, out_rows, lists.starts, mirrored)

    @property
    def nbytes(self) -> int:
        """Of what has been made of them."""
        short = 0 if self.short is None else self.short.in_rows.nbytes + self.short.out_rows.nbytes
        tensors = (self.__dict__.get(name) for name in ("in_rows", "out_rows"))
        lists: int = sum(rows.nbytes for rows in tensors if rows is not None)
        return short + lists

    @functools.cached_property
    def starts(self) -> list[int]:
        """Where the list of each offset begins, and where the last one ends, on the host."""
        assert self.short is not None
        counts = list(self.short.counts)
        if self.short.dense >= 0:
            counts[self.short.dense] = self.short.n_rows
        return [0, *itertools.accumulate(counts)]

    @functools.cached_property
    def in_rows(self) -> torch.Tensor:
        """int64 [P], list by list."""
        assert self.short is not None
        return torch.from_numpy(_with_dense(self.short.in_rows, self.short))

    @functools.cached_property
    def out_rows(self) -> torch.Tensor:
        """int64 [P], list by list."""
        assert self.short is not None
        return torch.from_numpy(_with_dense(self.short.out_rows, self.short))


def _with_dense(rows: Rows32, short: ShortPairs) -> Array:
    """`rows` int64 with the dense list inserted."""
    if short.dense < 0:
        return rows.astype(np.int64)
    at = sum(short.counts[: short.dense])
    return np.concatenate([rows[:at], np.arange(short.n_rows), rows[at:]])


@dataclasses.dataclass(eq=False)
class DevicePairs:
    """Pair lists int32 with their starts int64 [L + 1] on the device; see `PairLists` for the
    rest. Where only the device knows the number of rows, lists have room for more pairs than they
    hold.

    likely: about how many pairs they hold.  longest: pairs of the offset that has most, where the
    host knows.  lasting: they may be kept; otherwise whoever needs them asks again.
    """

    in_rows: torch.Tensor
    out_rows: torch.Tensor
    starts: torch.Tensor
    mirrored: bool
    likely: int
    longest: int | None = None
    lasting: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of rows and starts."""
        return self.in_rows.nbytes + self.out_rows.nbytes + self.starts.nbytes
