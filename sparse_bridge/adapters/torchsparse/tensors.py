"""Reading torchsparse tensors, real or stand-in, and making new ones of the same kind."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...errors import DataTypeError, DeviceError, ShapeError
from .maps import check_coords
from .profile import Profile

__all__ = [
    "caches_of",
    "check_input",
    "fapply",
    "make_like",
    "range_of",
    "register_sites",
    "triple",
]

Triple = tuple[int, int, int]


def triple(value: Any, name: str) -> Triple:
    """An int, or three of them, as a tuple of Python ints. Raises ShapeError."""
    if isinstance(value, (list, tuple, torch.Size)):
        numbers = tuple(int(n) for n in value)
    elif isinstance(value, torch.Tensor):
        numbers = tuple(int(n) for n in value.flatten().tolist())
    else:
        numbers = (int(value),) * 3
    if len(numbers) != 3:
        raise ShapeError(f"{name} is {value!r}; expected one number or three.")
    return numbers  # type: ignore[return-value]


@functools.cache
def _tensor_class(kind: Any) -> Any:
    """The framework's own SparseTensor behind a subclass of it."""
    for base in kind.__mro__:
        if base.__name__ == "SparseTensor" and base.__module__.partition(".")[0] == "torchsparse":
            return base
    return kind


def range_of(x: Any) -> tuple[int, ...] | None:
    """`spatial_range` as a tuple; None where the release has none."""
    found = getattr(x, "spatial_range", None)
    return None if found is None else tuple(found)


def caches_of(x: Any) -> Any:
    """What holds `cmaps` and `kmaps`: `_caches`, or the tensor itself in releases before 2.1."""
    return getattr(x, "_caches", x)


def make_like(
    x: Any,
    feats: torch.Tensor,
    coords: torch.Tensor,
    stride: Triple,
    spatial_range: tuple[int, ...] | None = None,
) -> Any:
    """A SparseTensor of x's kind that shares x's caches."""
    out = _tensor_class(x.__class__)(feats, coords, stride)
    if hasattr(out, "spatial_range"):
        out.spatial_range = spatial_range
    if hasattr(x, "_caches"):
        out._caches = x._caches
    else:
        out.cmaps, out.kmaps = x.cmaps, x.kmaps
    return out


def fapply(x: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """A tensor with `function(x.feats, ...)` as features; everything else is x's."""
    feats = function(x.feats, *args, **kwargs)
    return make_like(x, feats, x.coords, x.stride, range_of(x))


def register_sites(
    x: Any,
    profile: Profile,
    stride: Triple,
    coords: torch.Tensor,
    spatial_range: tuple[int, ...] | None,
    overwrite: bool = False,
) -> None:
    """Enter the coordinates at a tensor stride into `cmaps`, where the first ones stay."""
    value = (coords, spatial_range) if profile.batch_first else coords
    cmaps = caches_of(x).cmaps
    if overwrite:
        cmaps[stride] = value
    else:
        cmaps.setdefault(stride, value)


def check_input(x: Any, what: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(features [N, C], coordinates [N, 4]). Raises DataTypeError, ShapeError, DeviceError."""
    if not hasattr(x, "feats") or not hasattr(x, "coords"):
        raise DataTypeError(f"{what} takes a torchsparse.SparseTensor, got {type(x).__name__}.")
    feats, coords = x.feats, check_coords(x.coords, what)
    if not isinstance(feats, torch.Tensor):
        raise DataTypeError(
            f"{what} got features in a {type(feats).__name__}; expected a tensor (numpy arrays "
            "become tensors in sparse_collate)."
        )
    if feats.ndim != 2 or feats.shape[0] != coords.shape[0]:
        raise ShapeError(
            f"{what} got features {list(feats.shape)} for coordinates {list(coords.shape)}; "
            "expected [N, C] and [N, 4]."
        )
    if feats.device != coords.device:
        raise DeviceError(
            f"{what} got features on {feats.device} and coordinates on {coords.device}; "
            "move both to one device."
        )
    return feats, coords
