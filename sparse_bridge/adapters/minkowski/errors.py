"""Errors of this adapter: ours by type, and of the built-in kind that MinkowskiEngine raises."""

from __future__ import annotations

from ...errors import (
    ContractError,
    CoordinateError,
    DataTypeError,
    DeviceError,
    GeometryError,
    ShapeError,
    SparseBridgeError,
)


class ArgumentValueError(SparseBridgeError, ValueError):
    """An argument has a value outside of what the call takes."""


class FeatureShapeError(ShapeError, RuntimeError):
    """Rows or channels of features do not fit the coordinate map or the weight."""


class FeatureTypeError(DataTypeError, RuntimeError):
    """Features have a dtype that the layer does not take, or another one than its weight."""


class CoordinateTypeError(DataTypeError, RuntimeError):
    """Coordinates have a dtype or memory layout that the call does not take."""


class GeneratorTypeError(DataTypeError, AttributeError):
    """Something else stands where a layer takes a KernelGenerator."""


class KeyStateError(SparseBridgeError, RuntimeError):
    """A coordinate map key is unset where it must be set, or set where it must be unset."""


class StrideError(GeometryError, RuntimeError):
    """Tensor strides do not divide each other, or a tensor stride of 0 is asked for more."""


class TensorDeviceError(DeviceError, TypeError):
    """Features and coordinates of one operation live on different devices."""


class DimensionError(ContractError, TypeError):
    """A layer without its number of axes."""


class DenseIndexError(CoordinateError, IndexError):
    """A coordinate falls outside of the dense shape that was asked for."""


class ItemIndexError(ContractError, IndexError):
    """A batch index beyond those of the coordinate manager."""


class AbsentError(SparseBridgeError, AttributeError):
    """An attribute that this kind of tensor does not have."""


class FeaturesReadOnlyError(SparseBridgeError, AttributeError):
    """Features of a tensor were assigned; they belong to its coordinates."""


class ReadOnlyError(SparseBridgeError, SyntaxError):
    """An attribute that cannot be assigned."""
