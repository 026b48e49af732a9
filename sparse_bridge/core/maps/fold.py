"""Folding rows of equal coordinates onto distinct ones and back: with gradients, no atomics."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..device.rocm import linear
from .coordinate_map import Duplicates
from .host_index import PairLists
from .kernel_map import KernelMap, Rulebook

__all__ = ["copy_rows", "first_rows", "max_rows", "self_product", "sum_rows", "unfolded"]


def _sorted(fold: Duplicates) -> tuple[torch.Tensor, torch.Tensor]:
    """(live rows grouped by distinct coordinate, rows per coordinate)."""
    if fold.groups is None:
        order = torch.sort(fold.inverse, stable=True).indices
        counts = torch.bincount(fold.inverse, minlength=fold.map.n_rows + 1)[: fold.map.n_rows]
        fold.groups = (order[: int(counts.sum())], counts)
    return fold.groups


def _gather_sum(x: torch.Tensor, fold: Duplicates) -> torch.Tensor:
    rows, counts = _sorted(fold)
    work = x if x.dtype == torch.float64 else x.float()
    return torch.segment_reduce(work.index_select(0, rows), "sum", lengths=counts, unsafe=True).to(
        x.dtype
    )


def _scatter_copy(y: torch.Tensor, fold: Duplicates) -> torch.Tensor:
    return torch.cat([y, y.new_zeros((1, y.shape[1]))]).index_select(0, fold.inverse)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fold: Duplicates) -> torch.Tensor:
        ctx.fold = fold
        return _gather_sum(x, fold)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor):  # type: ignore[no-untyped-def]
        return _scatter_copy(dy, ctx.fold), None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, fold: Duplicates) -> torch.Tensor:
        ctx.fold = fold
        return _scatter_copy(y, fold)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor):  # type: ignore[no-untyped-def]
        return _gather_sum(dy, ctx.fold), None


class _Max(torch.autograd.Function):
    """Every row that equals its group's maximum takes the whole gradient, as in local pools."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fold: Duplicates) -> torch.Tensor:
        rows, counts = _sorted(fold)
        y = torch.segment_reduce(x.index_select(0, rows), "max", lengths=counts, unsafe=True)
        ctx.save_for_backward(x, y)
        ctx.fold = fold
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor):  # type: ignore[no-untyped-def]
        x, y = ctx.saved_tensors
        equal = x == _scatter_copy(y, ctx.fold)
        return torch.where(equal, _scatter_copy(dy, ctx.fold), 0), None


def sum_rows(x: torch.Tensor, fold: Duplicates) -> torch.Tensor:
    """[N, C] -> [U, C]: sums of the rows of each distinct coordinate."""
    return _Sum.apply(x, fold)


def max_rows(x: torch.Tensor, fold: Duplicates) -> torch.Tensor:
    """[N, C] -> [U, C]: maxima of the rows of each distinct coordinate."""
    return _Max.apply(x, fold)


def copy_rows(y: torch.Tensor, fold: Duplicates) -> torch.Tensor:
    """[U, C] -> [N, C]: every row takes its distinct coordinate's, dead rows zeros."""
    return _Copy.apply(y, fold)


def first_rows(x: torch.Tensor, fold: Duplicates) -> torch.Tensor:
    """[N, C] -> [U, C]: the first row of each distinct coordinate."""
    return x.index_select(0, fold.first)


def self_product(
    x: torch.Tensor, weight: torch.Tensor, layout: str, groups: int, v: int
) -> torch.Tensor:
    """x @ w[v], grouped, with gradients."""
    if layout == "vio":
        matrix = weight[v] if weight.ndim == 3 else weight
    else:
        matrix = weight.reshape(weight.shape[0], -1, weight.shape[-1])[:, v].t()
    if groups == 1:
        return linear(x, matrix)
    parts = zip(x.chunk(groups, 1), matrix.chunk(groups, 1), strict=True)
    return torch.cat([linear(left, right) for left, right in parts], 1)


def unfolded(kmap: KernelMap) -> KernelMap:
    """A folded submanifold map as explicit pairs of its rows: every row meets itself at the zero
    offset and the first of equal rows at the others. Made once and kept with the rulebook."""
    rulebook, fold = kmap.rulebook, kmap.x_fold
    assert fold is not None
    found = rulebook.plans.get("unfolded")
    if found is None:
        rows, counts = _sorted(fold)
        begins = counts.cumsum(0) - counts
        every = torch.arange(len(fold.inverse), device=kmap.device)
        x_parts, y_parts, starts = [], [], [0]
        for v in range(kmap.n_offsets):
            if v == kmap.self_offset:
                x_rows = y_rows = every
            else:
                x_sites, y_sites = rulebook.pair_list(v)
                lengths = counts.index_select(0, y_sites)
                ends = lengths.cumsum(0)
                within = torch.arange(int(lengths.sum()), device=kmap.device)
                within -= (ends - lengths).repeat_interleave(lengths)
                y_rows = rows[begins.index_select(0, y_sites).repeat_interleave(lengths) + within]
                x_rows = fold.first.index_select(0, x_sites).repeat_interleave(lengths)
            x_parts.append(x_rows)
            y_parts.append(y_rows)
            starts.append(starts[-1] + len(x_rows))
        lists = PairLists(torch.cat(x_parts), torch.cat(y_parts), starts, False)
        n = len(every)
        found = KernelMap(Rulebook(n, n, kmap.n_offsets, kmap.device, lists=lists, regular=None))
        rulebook.plans["unfolded"] = found
    return found.transposed() if kmap.flipped else found
