"""Folding rows of equal coordinates onto distinct ones and back: with gradients, no atomics."""

from __future__ import annotations

import torch

from ..device.rocm import linear
from .coordinate_map import Duplicates
from .segments import SegmentOperator, multiply, segment_max


def sum_rows(x: torch.Tensor, fold: Duplicates) -> torch.Tensor:
    """[N, C] -> [U, C]: sums of the rows of each distinct coordinate."""
    return multiply(x, SegmentOperator(fold.segments))


def max_rows(x: torch.Tensor, fold: Duplicates) -> torch.Tensor:
    """[N, C] -> [U, C]: maxima of the rows of each distinct coordinate. Every row that equals its
    maximum takes the whole gradient, as in local pools."""
    return segment_max(x, fold.segments, ties=True)


def copy_rows(y: torch.Tensor, fold: Duplicates) -> torch.Tensor:
    """[U, C] -> [N, C]: every row takes its distinct coordinate's, dead rows zeros."""
    return multiply(y, SegmentOperator(fold.segments, gathers=True))


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
