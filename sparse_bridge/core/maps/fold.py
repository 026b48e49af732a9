"""Folding rows of equal coordinates onto distinct ones and back: with gradients, no atomics."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..device.rocm import linear
from .coordinate_map import Duplicates

__all__ = ["copy_rows", "first_rows", "max_rows", "self_product", "sum_rows"]


def _gather_sum(x: torch.Tensor, fold: Duplicates) -> torch.Tensor:
    rows, counts = fold.groups()
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
        rows, counts = fold.groups()
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
