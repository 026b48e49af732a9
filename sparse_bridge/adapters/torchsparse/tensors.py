"""Reading torchsparse tensors, real or stand-in, and making new ones of the same kind."""

from __future__ import annotations

from typing import Any

import torch

from ...core.arguments import expect_tensors
from ...core.conv.deferred import features_of, materialize
from ...core.conv.deferred.conv import DeferredConv
from ...errors import CoordinateError, DataTypeError, DeviceError, ShapeError, SparseInputError
from ..convert import kind_of
from .profile import Profile
from .spec import Triple

__all__ = [
    "alone",
    "caches_of",
    "check_coords",
    "check_input",
    "expect_sparse",
    "fapply",
    "feats_of",
    "make_like",
    "output_of",
    "range_of",
    "with_feats",
]


def _tensor_class(subclass: Any) -> Any:
    """The framework's own SparseTensor behind a subclass of it."""
    for base in subclass.__mro__:
        if base.__name__ == "SparseTensor" and base.__module__.partition(".")[0] == "torchsparse":
            return base
    return subclass


def range_of(x: Any) -> tuple[int, ...] | None:
    """`spatial_range` as a tuple; None where the release has none."""
    spatial_range = getattr(x, "spatial_range", None)
    return None if spatial_range is None else tuple(spatial_range)


def caches_of(x: Any) -> Any:
    """What holds `cmaps` and `kmaps`: `_caches`, or the tensor itself in releases before 2.1."""
    return getattr(x, "_caches", x)


def make_like(
    x: Any,
    feats: torch.Tensor | DeferredConv,
    coords: torch.Tensor,
    stride: Triple,
    spatial_range: tuple[int, ...] | None = None,
) -> Any:
    """A SparseTensor of x's class that shares x's caches."""
    own = getattr(x.__class__, "_own", None)
    if own is not None:  # the stand-in's: nothing to convert
        return own._of_parts(feats, coords, stride, spatial_range, x._caches)
    tensor_class = _tensor_class(x.__class__)
    if type(feats) is DeferredConv:
        feats = features_of(feats)
    out = tensor_class(feats, coords, stride)
    if hasattr(out, "spatial_range"):
        out.spatial_range = spatial_range
    if hasattr(x, "_caches"):
        out._caches = x._caches
    else:
        out.cmaps, out.kmaps = x.cmaps, x.kmaps
    return out


def alone(x: Any, feats: torch.Tensor, coords: torch.Tensor) -> Any:
    """A SparseTensor of x's kind over other coordinates, with caches of its own."""
    out = make_like(x, feats, coords, x.stride, range_of(x))
    if hasattr(x, "_caches"):
        out._caches = type(x._caches)()
    else:
        out.cmaps, out.kmaps = {}, {}
    return out


def with_feats(x: Any, feats: torch.Tensor | DeferredConv) -> Any:
    """A tensor with other features [N, C]; everything else is x's."""
    own = getattr(x.__class__, "_own", None)
    if own is not None:  # the stand-in's
        return own._of_parts(feats, x.coords, x.stride, range_of(x), x._caches)
    return make_like(x, feats, x.coords, x.stride, range_of(x))


def expect_sparse(caller: str, *inputs: Any) -> None:
    """Raises SparseInputError for one that is no SparseTensor, nor like one."""
    for x in inputs:
        if not (hasattr(x, "stride") and hasattr(x, "coords") and hasattr(x, "feats")):
            raise SparseInputError(f"{caller} takes a torchsparse.SparseTensor, got {kind_of(x, 'torchsparse')}.")


def feats_of(x: Any, caller: str) -> Any:
    """The features of a SparseTensor. Raises SparseInputError."""
    feats = getattr(x, "feats", None)
    if feats is None:
        expect_sparse(caller, x)
    return feats


def fapply(input: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
    """A tensor with `fn(input.feats, ...)` as features; everything else is the input's. Raises SparseInputError."""
    feats = feats_of(input, "fapply")
    expect_tensors("fapply", feats=feats)
    return with_feats(input, fn(feats, *args, **kwargs))


def output_of(
    x: Any,
    profile: Profile,
    feats: torch.Tensor | DeferredConv,
    coords: torch.Tensor,
    stride: Triple,
    spatial_range: tuple[int, ...] | None,
) -> Any:
    """`make_like` for a layer's output, whose coordinates are entered into `cmaps`; the first ones
    at a tensor stride stay there."""
    cmaps = caches_of(x).cmaps
    if stride not in cmaps:
        cmaps[stride] = (coords, spatial_range) if profile.batch_first else coords
    return make_like(x, feats, coords, stride, spatial_range)


def check_coords(coords: Any, caller: str) -> torch.Tensor:
    """`coords` if they are int32 [N, 4] in a tensor. Raises DataTypeError, ShapeError."""
    if not isinstance(coords, torch.Tensor):
        expect_tensors(caller, coords=coords)
    if coords.ndim != 2 or coords.shape[1] != 4:
        raise ShapeError(f"{caller} got coordinates of shape {list(coords.shape)}; expected [N, 4].")
    if coords.dtype != torch.int32:
        raise DataTypeError(f"{caller} got coordinates of {coords.dtype}; expected torch.int32 (use .int()).")
    return coords


def check_pair(feats: torch.Tensor, coords: Any, caller: str) -> torch.Tensor:
    """`coords` if they are int32 [N, 4] beside features [N, C]. Raises DataTypeError, ShapeError,
    DeviceError."""
    coords = check_coords(coords, caller)
    if not isinstance(feats, torch.Tensor):
        expect_tensors(caller, feats=feats)
    if feats.ndim != 2 or feats.shape[0] != coords.shape[0]:
        raise ShapeError(
            f"{caller} got features {list(feats.shape)} for coordinates {list(coords.shape)}; "
            "expected [N, C] and [N, 4]."
        )
    if feats.device != coords.device:
        raise DeviceError(
            f"{caller} got features on {feats.device} and coordinates on {coords.device}; move both to one device."
        )
    return coords


def check_input(x: Any, caller: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(features [N, C], coordinates [N, 4]). Raises SparseInputError, DataTypeError, ShapeError, DeviceError."""
    try:
        feats, coords, _ = x.feats, x.coords, x.stride
    except AttributeError:
        raise SparseInputError(f"{caller} takes a torchsparse.SparseTensor, got {kind_of(x, 'torchsparse')}.") from None
    if type(feats) is not torch.Tensor:
        feats = materialize(feats)
    check_pair(feats, coords, caller)
    return feats, coords


def item_counts(batch: torch.Tensor, least: int, most: int, caller: str) -> torch.Tensor:
    """Rows of every batch item, int64 [most + 1]. batch: the indices, between least and most.

    Raises: ShapeError (no rows), CoordinateError (a negative index; in a pool for maxima, an item
        without rows).
    """
    if batch.shape[0] == 0:
        raise ShapeError(
            f"{caller} got a tensor without rows, so it cannot tell how many batch items there are; "
            "leave such batches out."
        )
    if least < 0:
        raise CoordinateError(f"{caller} got the batch index {least}; expected 0 or more.")
    counts = torch.bincount(batch.long(), minlength=most + 1)
    if caller == "GlobalMaxPool" and not bool(counts.all()):
        item = int((counts == 0).nonzero()[0])
        raise CoordinateError(f"{caller}: batch item {item} has no rows, hence no maximum.")
    return counts
