"""Submanifold convolution of any dimension and of any symmetric list of offsets."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ..ledger import note
from .caches import SubMConvNeighborCache
from .conv import multiply
from .errors import ArgumentShapeError, ArgumentValueError
from .lattice import Deltas, Lattice, lattice, submanifold_map
from .options import form

__all__ = ["sparse_submanifold_conv", "sparse_submanifold_conv_any_offset"]


def sparse_submanifold_conv(
    feats: torch.Tensor, coords: torch.Tensor, shape: Sequence[int] | None, weight: torch.Tensor,
    bias: torch.Tensor | None = None, neighbor_cache: Any = None, dilation: Any = 1,
    algorithm: Any = None,
) -> tuple[torch.Tensor, Any]:  # fmt: skip
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
    what, dimension = "sparse_submanifold_conv", weight.ndim - 2
    if dimension < 1:
        raise ArgumentValueError(
            f"{what} got a weight of shape {list(weight.shape)}; expected [C_out, k1 .. kD, C_in]."
        )
    how = form(algorithm)
    cache = neighbor_cache
    if cache is None:
        deltas = centred(tuple(weight.shape[1:-1]), dilation)
        cut = coords.shape[1] - dimension
        if shape is not None and len(shape) != coords.shape[1] + 1:
            raise ArgumentValueError(
                f"{what} got shape {tuple(shape)} for coordinates of {coords.shape[1]} columns; "
                "expected (batch sizes, channels, S1 .. SD)."
            )
        sizes = None if shape is None else (*shape[:cut], *shape[cut + 1 :])
        cache = _cache(lattice(coords, dimension, sizes, what), deltas)
    found = _multiplied(what, feats, cache, weight, bias, how)
    return found, cache


def sparse_submanifold_conv_any_offset(
    feats: torch.Tensor, coords: torch.Tensor, offsets: Any, weight: torch.Tensor,
    bias: torch.Tensor | None = None, neighbor_cache: Any = None, algorithm: Any = None,
) -> tuple[torch.Tensor, Any]:  # fmt: skip
    """out[n] = bias + sum of weight[:, v] feats at coord_n + offsets[v].

    Args:
        offsets: [V, D], a tensor or nested sequence; reversed and negated it must be itself.
        weight: [C_out, V, C_in].  The others as in `sparse_submanifold_conv`; there is no shape.

    Raises: as `sparse_submanifold_conv`.
    """
    what = "sparse_submanifold_conv_any_offset"
    how = form(algorithm)
    cache = neighbor_cache
    if weight.ndim != 3:
        raise ArgumentValueError(
            f"{what} got a weight of shape {list(weight.shape)}; expected [C_out, V, C_in]."
        )
    if cache is None:
        deltas = deltas_of(offsets)
        if deltas != tuple(tuple(-c for c in delta) for delta in reversed(deltas)):
            raise ArgumentShapeError(
                f"{what} got offsets that differ from their own negated flip; offset V - 1 - v "
                "must be the negative of offset v."
            )
        cache = _cache(lattice(coords, len(deltas[0]), None, what), deltas)
    return _multiplied(what, feats, cache, weight, bias, how), cache


def centred(kernel: tuple[int, ...], dilation: Any) -> Deltas:
    """Offsets (t - k // 2) * d, last axis fastest. Raises ArgumentValueError for even sizes."""
    steps = (dilation,) * len(kernel) if isinstance(dilation, int) else tuple(dilation)
    if any(k % 2 == 0 for k in kernel) or len(steps) != len(kernel) or min(steps) < 1:
        raise ArgumentValueError(
            f"a submanifold kernel of size {kernel} and dilation {dilation!r}; every size must be "
            "odd and every dilation at least 1."
        )
    axes = [[(t - k // 2) * d for t in range(k)] for k, d in zip(kernel, steps, strict=True)]
    return tuple(itertools.product(*axes))


def deltas_of(offsets: Any) -> Deltas:
    """[V, D] of a tensor or nested sequence. Raises ArgumentValueError."""
    rows = offsets.tolist() if isinstance(offsets, torch.Tensor) else offsets
    found = tuple(tuple(int(c) for c in row) for row in rows)
    if not found or not found[0] or len({len(row) for row in found}) != 1:
        raise ArgumentValueError(f"kernel offsets are {offsets!r}; expected [V, D].")
    return found


def _cache(own: Lattice, deltas: Deltas) -> SubMConvNeighborCache:
    made = SubMConvNeighborCache.of(submanifold_map(own, deltas))
    made.__dict__["_store"] = own.store
    return made  # type: ignore[return-value]


def _multiplied(
    what: str, feats: torch.Tensor, cache: Any, weight: torch.Tensor,
    bias: torch.Tensor | None, how: Any,
) -> torch.Tensor:  # fmt: skip
    if feats.ndim != 2 or feats.shape[1] != weight.shape[-1]:
        raise ArgumentShapeError(
            f"{what} got features of shape {list(feats.shape)}; expected [N, {weight.shape[-1]}]."
        )
    out = multiply(feats, cache, weight, bias, how)
    note("flex_gemm", what)
    return out
