"""Sparse tensors from one framework to another; gradients flow through."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from ..core.geometry.sparse_data import SparseData
from ..errors import DataTypeError, SettingError
from . import base

__all__ = ["convert", "framework_of"]

# Where each framework keeps its class; looked up among imported modules only.
_CLASSES = {
    "spconv": ("spconv.pytorch", "SparseConvTensor"),
    "torchsparse": ("torchsparse", "SparseTensor"),
    "minkowski": ("MinkowskiEngine", "SparseTensor"),
}


def framework_of(x: Any) -> str | None:
    """Name of the framework that `x` is a sparse tensor of, "core" for a SparseData, else None."""
    if isinstance(x, SparseData):
        return "core"
    for name, (module, attribute) in _CLASSES.items():
        found = getattr(sys.modules.get(module), attribute, None)
        if isinstance(found, type) and isinstance(x, found):
            return name
    return None


def _adapter(name: str) -> Any:
    """The adapter's package, which has `to_core` and `from_core`."""
    return importlib.import_module(base.ADAPTERS[name].partition(":")[0])


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

    Coordinates are those of x's own grid. Frameworks that store multiples of a tensor stride
    (MinkowskiEngine, torchsparse up to 2.0) are divided by it and multiplied with it; spconv knows
    none, so pass `tensor_stride` when a coarse spconv tensor goes into one of those.

    Args:
        x: a SparseConvTensor, a torchsparse or MinkowskiEngine SparseTensor, or a SparseData.
        to: "spconv", "torchsparse", "minkowski" or "core" (a SparseData).
        like: a tensor of the target framework whose grid and map caches the result joins.
        tensor_stride, spatial_shape, batch_size: instead of what x says, or does not say.

    Raises: SettingError (unknown `to`), DataTypeError (x is none of these), LifecycleError (the
        target is not there: call enable() for it), CoordinateError and GeometryError (the target
        cannot hold these coordinates).
    """
    if to != "core" and to not in _CLASSES:
        raise SettingError(f"to={to!r}; expected one of core, {', '.join(_CLASSES)}.")
    source = framework_of(x)
    if source is None:
        raise DataTypeError(
            f"a {type(x).__name__} is no sparse tensor of an imported framework "
            f"({', '.join(_CLASSES)})."
        )
    data = x if source == "core" else _adapter(source).to_core(x)
    given = {
        "tensor_stride": None if tensor_stride is None else tuple(tensor_stride),
        "spatial_shape": None if spatial_shape is None else tuple(spatial_shape),
        "batch_size": batch_size,
    }
    data = dataclasses.replace(data, **{k: v for k, v in given.items() if v is not None})
    return data if to == "core" else _adapter(to).from_core(data, like)
