"""Quantisation of bare points, as data loaders do it."""

from __future__ import annotations

import torch

from ...core.maps.lookup import distinct_rows
from .errors import CoordinateTypeError
from .quantize import vote_labels

__all__ = ["quantize_labels", "quantize_points"]


def quantize_points(coords: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(first row of every distinct coordinate, the distinct coordinate of every row), int64.

    coords: int32 [N, D]; distinct ones are numbered in the order of their first row.
    Raises: CoordinateTypeError.
    """
    if coords.dtype != torch.int32 or coords.ndim != 2 or coords.shape[1] < 1:
        raise CoordinateTypeError(
            f"coordinates are {coords.dtype} of shape {list(coords.shape)}; expected int32 [N, D]."
        )
    return distinct_rows(coords)


def quantize_labels(
    coords: torch.Tensor, labels: torch.Tensor, ignore_label: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`quantize_points` and the label of every distinct coordinate, `ignore_label` on conflict.

    labels: int32 [N] on the CPU. Raises: CoordinateTypeError.
    """
    if labels.dtype != torch.int32 or labels.shape != coords.shape[:1]:
        raise CoordinateTypeError(
            f"labels are {labels.dtype} of shape {list(labels.shape)}; "
            f"expected int32 [{coords.shape[0]}]."
        )
    first, inverse = quantize_points(coords)
    return first, inverse, vote_labels(labels, first, inverse, ignore_label)
