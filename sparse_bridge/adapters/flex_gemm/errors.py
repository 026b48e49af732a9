"""Errors of this adapter: ours by type, and of the built-in kind that FlexGEMM raises."""

from __future__ import annotations

from ...errors import ContractError, DataTypeError, ShapeError, SparseBridgeError, UnsupportedError


class ArgumentShapeError(ShapeError, ContractError):
    """A tensor has another rank, row count or channel count than the call takes."""


class ArgumentTypeError(DataTypeError, ContractError):
    """A tensor has another dtype than the call takes."""


class PointTypeError(DataTypeError, RuntimeError):
    """Points, coordinates or codes have another dtype than the call takes."""


class ArgumentValueError(SparseBridgeError, ValueError):
    """An argument has a value outside of what the call takes."""


class GenerationError(UnsupportedError, AttributeError):
    """A name of the other generation of FlexGEMM than the profile in force."""


class GenerationImportError(UnsupportedError, ImportError):
    """A module of the other generation of FlexGEMM than the profile in force."""


def other_generation(name: str, profile: str, module: bool = False) -> SparseBridgeError:
    """The error of `name`, which only `profile` has."""
    error_class = GenerationImportError if module else GenerationError
    return error_class(
        f"{name} is of FlexGEMM {profile}, and the process runs with another profile. Say which "
        f"generation the project is written for: sparse_bridge.disable('flex_gemm'), then "
        f"enable('flex_gemm', profile={profile!r})."
    )
