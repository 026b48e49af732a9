"""Sparse tensors from one framework to another; gradients flow through."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..core.geometry.sparse_data import SparseData
from ..errors import DataTypeError, SettingError
from ..names import meant
from . import base, protocol


def framework_of(x: Any) -> str | None:
    """Name of the framework that `x` is a sparse tensor of, "core" for a SparseData, else None."""
    if isinstance(x, SparseData):
        return "core"
    return next((framework.name for framework in base.frameworks() if framework.takes(x)), None)


def kind_of(x: Any, to: str) -> str:
    """What an error calls `x` where a sparse tensor of framework `to` belongs: its class, and of another framework
    the call that converts it."""
    of, kind = framework_of(x), type(x).__name__
    return kind if of in (None, to) else f"{kind} of {of} (sparse_bridge.convert(x, to={to!r}) converts it)"


def convert(
    x: Any,
    to: str,
    like: Any = None,
    *,
    tensor_stride: Sequence[int] | None = None,
    spatial_shape: Sequence[int] | None = None,
    batch_size: int | None = None,
) -> Any:
    """`x` as a sparse tensor of another framework; features are shared, rows keep their order.

    Coordinates are those of x's own grid. Frameworks that store multiples of a tensor stride are
    divided by it and multiplied with it; others know none, so pass `tensor_stride` when a coarse
    tensor of those goes into one that does.

    Bounds that are given, or those of a `like` that has some, must hold the rows: to see that is to
    wait for the device, as it is to find bounds that nobody gives.

    Args:
        x: a sparse tensor of any framework, FlexGEMM's tuple (feats, coords, shape), or a SparseData.
        to: "spconv", "torchsparse", "minkowski", "flex_gemm", or "core" (a SparseData).
        like: a tensor of the target framework whose grid and map caches the result joins.
        tensor_stride: one value per axis, instead of what x says, or does not say.
        spatial_shape: cells per axis, likewise.
        batch_size: number of scenes, likewise.

    Raises:
        SettingError: unknown `to`.
        DataTypeError: x is none of these, or another argument is not what it has to be.
        LifecycleError: the target is not there: call enable() for it.
        CoordinateError: the target cannot hold these coordinates, or the bounds do not.
        GeometryError: nor this grid.
    """
    to = base.name_of(to)
    if to != "core" and to not in base.ADAPTERS:
        hint = meant(str(to), base.ADAPTERS)
        raise SettingError(f"to={to!r}; expected one of core, {', '.join(base.ADAPTERS)}.{hint}")
    source = framework_of(x)
    if source is None:
        raise DataTypeError(
            f"{type(x).__name__} is no sparse tensor of an imported framework ({', '.join(base.ADAPTERS)}), nor "
            "FlexGEMM's tuple (feats, coords, shape)."
        )
    data = x if source == "core" else protocol.of_framework(source).to_core(x)
    if like is not None and to != "core":
        _check_like(like, to)
    overrides = {
        "tensor_stride": _per_axis("tensor_stride", tensor_stride),
        "spatial_shape": _per_axis("spatial_shape", spatial_shape),
        "batch_size": batch_size,
    }
    if batch_size is not None and not hasattr(batch_size, "__index__"):
        raise DataTypeError(f"batch_size is {batch_size!r}; expected a whole number.")
    data = dataclasses.replace(data, **{k: v for k, v in overrides.items() if v is not None})
    if spatial_shape is not None or batch_size is not None:
        data.check_inside(data.spatial_shape, data.batch_size)
    return data if to == "core" else protocol.of_framework(to).from_core(data, like)


def _check_like(like: Any, to: str) -> None:
    """Raises DataTypeError for what cannot be of framework `to`. Its other classes, such as fields, have what it
    takes."""
    of = framework_of(like)
    if of != to and (of is not None or type(like).__module__ in ("builtins", "torch")):
        raise DataTypeError(f"like is {type(like).__name__}; expected a sparse tensor of {to}.")


def _per_axis(name: str, values: Sequence[int] | None) -> tuple[int, ...] | None:
    """The values of an argument. Raises DataTypeError for a single number."""
    if values is not None and not hasattr(values, "__iter__"):
        raise DataTypeError(f"{name} is {values!r}; expected one number for each axis.")
    return None if values is None else tuple(values)
