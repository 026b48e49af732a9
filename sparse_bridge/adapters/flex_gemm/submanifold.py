"""Submanifold convolution of any dimension and of any symmetric list of offsets."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ...core.traced import between_graphs
from ..call_stats import note
from .arguments import check_operands, check_tensors, integers, per_axis, shape_entries
from .caches import SubMConvNeighborCache
from .conv import multiply
from .errors import ArgumentShapeError, ArgumentTypeError, ArgumentValueError
from .lattice import Deltas, Lattice, columns_of, lattice, submanifold_map
from .options import form

__all__ = ["sparse_submanifold_conv", "sparse_submanifold_conv_any_offset"]


@between_graphs
def sparse_submanifold_conv(
    feats: torch.Tensor,
    coords: torch.Tensor,
    shape: Sequence[int] | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    neighbor_cache: Any = None,
    dilation: Any = 1,
    algorithm: Any = None,
) -> tuple[torch.Tensor, Any]:
    """`sparse_submanifold_conv3d` of the weight's dimension D.

    Args:
        feats: [N, C_in].  coords: int32 [N, batch columns + D].
        shape: (batch sizes, channels, S1 .. SD); None: the bounds of the coordinates.
        weight: [C_out, k1 .. kD, C_in], odd kernel sizes.  bias: [C_out] or None.
        neighbor_cache: of an earlier call with these coordinates and this kernel.
        dilation: one, or one per axis.  algorithm: checked, without effect.

    Returns: ([N, C_out] in feats' dtype, the cache).
    Raises: ArgumentShapeError, ArgumentTypeError, ArgumentValueError, DataTypeError, DeviceError.
    """
    caller = "sparse_submanifold_conv"
    check_tensors(caller, weight=weight)
    dimension = weight.ndim - 2
    if dimension < 1:
        raise ArgumentValueError(
            f"{caller} got a weight of shape {list(weight.shape)}; expected [C_out, k1 .. kD, C_in]."
        )
    how = form(algorithm)
    cache = neighbor_cache
    if cache is None:
        deltas = centred(tuple(weight.shape[1:-1]), dilation)
        n_columns = columns_of(coords, dimension, caller)
        numbers = None
        if shape is not None:
            layout = f"(batch sizes, channels, {dimension} extents), {n_columns + 1} entries"
            cut, entries = n_columns - dimension, shape_entries(shape, n_columns + 1, layout)
            numbers = (*entries[:cut], *entries[cut + 1 :])
        cache = _cache(lattice(coords, dimension, numbers, caller), deltas)
    y = _multiplied(caller, feats, cache, weight, bias, how)
    return y, cache


@between_graphs
def sparse_submanifold_conv_any_offset(
    feats: torch.Tensor,
    coords: torch.Tensor,
    offsets: Any,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    neighbor_cache: Any = None,
    algorithm: Any = None,
) -> tuple[torch.Tensor, Any]:
    """out[n] = bias + sum of weight[:, v] feats at coord_n + offsets[v].

    Args:
        offsets: [V, D], a tensor or nested sequence; reversed and negated it must be itself.
        weight: [C_out, V, C_in].  The others as in `sparse_submanifold_conv`; there is no shape.

    Raises: as `sparse_submanifold_conv`.
    """
    caller = "sparse_submanifold_conv_any_offset"
    check_tensors(caller, weight=weight)
    how = form(algorithm)
    cache = neighbor_cache
    if weight.ndim != 3:
        raise ArgumentValueError(f"{caller} got a weight of shape {list(weight.shape)}; expected [C_out, V, C_in].")
    if cache is None:
        deltas = deltas_of(offsets)
        if deltas != tuple(tuple(-c for c in delta) for delta in reversed(deltas)):
            raise ArgumentShapeError(
                f"{caller} got offsets that differ from their own negated flip; offset V - 1 - v "
                "must be the negative of offset v."
            )
        cache = _cache(lattice(coords, len(deltas[0]), None, caller), deltas)
    return _multiplied(caller, feats, cache, weight, bias, how), cache


def centred(kernel: tuple[int, ...], dilation: Any) -> Deltas:
    """Offsets (t - k // 2) * d, last axis fastest. Raises ArgumentValueError for even sizes."""
    steps = per_axis(dilation, len(kernel), "dilation", 1)
    if any(k % 2 == 0 for k in kernel):
        raise ArgumentValueError(f"a submanifold kernel of size {kernel}; every size must be odd.")
    axes = [[(t - k // 2) * d for t in range(k)] for k, d in zip(kernel, steps, strict=True)]
    return tuple(itertools.product(*axes))


def deltas_of(offsets: Any) -> Deltas:
    """[V, D] of a tensor or nested sequence. Raises ArgumentTypeError, ArgumentValueError."""
    rows = offsets
    if isinstance(offsets, torch.Tensor):
        check_tensors("the kernel", offsets=offsets)
        rows = offsets.tolist()
    if not hasattr(rows, "__iter__"):
        raise ArgumentTypeError(f"kernel offsets are {offsets!r}; expected [V, D].")
    deltas = tuple(integers(row, "a kernel offset") for row in rows)
    if not deltas or not deltas[0] or len({len(row) for row in deltas}) != 1:
        raise ArgumentValueError(f"kernel offsets are {offsets!r}; expected [V, D].")
    return deltas


def _cache(own: Lattice, deltas: Deltas) -> SubMConvNeighborCache:
    cache = SubMConvNeighborCache.of(submanifold_map(own, deltas))
    cache.__dict__["_store"] = own.store
    return cache  # type: ignore[return-value]


def _multiplied(
    caller: str, feats: torch.Tensor, cache: Any, weight: torch.Tensor, bias: torch.Tensor | None, how: Any
) -> torch.Tensor:
    check_operands(caller, feats, weight, bias)
    if feats.ndim != 2 or feats.shape[1] != weight.shape[-1]:
        raise ArgumentShapeError(
            f"{caller} got features of shape {list(feats.shape)}; expected [N, {weight.shape[-1]}]."
        )
    out = multiply(feats, cache, weight, bias, how, feats.shape[0])
    note("flex_gemm", caller)
    return out
