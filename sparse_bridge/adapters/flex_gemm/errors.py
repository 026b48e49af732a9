"""Errors of this adapter: ours by type, and of the built-in kind that FlexGEMM raises."""

from __future__ import annotations

from ...errors import ContractError, DataTypeError, ShapeError, SparseBridgeError


class ArgumentShapeError(ShapeError, ContractError):
    """A tensor has another rank, row count or channel count than the call takes."""


class ArgumentTypeError(DataTypeError, ContractError):
    """A tensor has another dtype than the call takes."""


class PointTypeError(DataTypeError, RuntimeError):
    """Points, coordinates or codes have another dtype than the call takes."""


class ArgumentValueError(SparseBridgeError, ValueError):
    """An argument has a value outside of what the call takes."""
