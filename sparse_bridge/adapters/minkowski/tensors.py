"""Checks of the constructors of tensors, and the names of 0.4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...errors import ContractError, DataTypeError
from . import profile
from .errors import CoordinateTypeError

# Keywords of 0.4's SparseTensor: what they are called now, and those that mean nothing.
OLD_NAMES = {
    "feats": "features",
    "coords": "coordinates",
    "coords_key": "coordinate_map_key",
    "coords_manager": "coordinate_manager",
}
OLD_SWITCHES = (
    "force_creation",
    "allow_duplicate_coords",
    "memory_manager_backend",
    "is_transpose",
)


def old_names(
    what: str, old: Mapping[str, Any], names: Mapping[str, str], switches: Sequence[str], **new: Any
) -> list[Any]:  # fmt: skip
    """The values of `new` in order, filled in from keyword arguments of MinkowskiEngine 0.4.

    switches: keywords of 0.4 that mean nothing here. Raises: DataTypeError for others.
    """
    if old:
        profile.saw_old(f"{what}({', '.join(old)}=...)")
    for name, value in old.items():
        if name in switches:
            continue
        if name not in names or new[names[name]] is not None:
            raise DataTypeError(f"{what} got an unexpected keyword argument {name!r}.")
        new[names[name]] = value
    return list(new.values())


def drop_old(what: str, old: Mapping[str, Any], names: Sequence[str] = ("dimension", "D")) -> None:
    """Accept keywords of 0.4 that mean nothing any more. Raises: DataTypeError for others."""
    if old:
        profile.saw_old(f"{what}({', '.join(old)}=...)")
    for name in old:
        if name not in names:
            raise DataTypeError(f"{what} got an unexpected keyword argument {name!r}.")


def check_features(features: Any) -> None:
    """Raises: ContractError unless features are a tensor [N, C]."""
    if not isinstance(features, torch.Tensor):
        raise ContractError(f"features are {type(features).__name__}; expected a torch.Tensor.")
    if features.ndim != 2:
        raise ContractError(f"features have shape {list(features.shape)}; expected [N, C].")


def check_pair(features: torch.Tensor, coordinates: Any) -> None:
    """Raises: ContractError, CoordinateTypeError unless coordinates [N, D + 1] fit the features."""
    if not isinstance(coordinates, torch.Tensor):
        raise ContractError(
            f"coordinates are {type(coordinates).__name__}; expected a torch.Tensor."
        )
    if coordinates.ndim != 2 or coordinates.shape[1] < 2:
        raise ContractError(
            f"coordinates have shape {list(coordinates.shape)}; "
            "expected [N, D + 1], batch index first."
        )
    if features.shape[0] != coordinates.shape[0]:
        raise ContractError(
            f"{features.shape[0]} rows of features for {coordinates.shape[0]} coordinates; "
            "both must have N rows."
        )
    if features.device != coordinates.device:
        raise ContractError(
            f"features on {features.device}, coordinates on {coordinates.device}; "
            "give device=, which moves both."
        )
    if not coordinates.is_contiguous():
        raise CoordinateTypeError("coordinates must be contiguous (use .contiguous()).")


def followed(features: torch.Tensor, coordinates: Any) -> Any:
    """In 0.4 coordinates stayed on the CPU while features were on a GPU; here they follow."""
    if isinstance(coordinates, torch.Tensor) and coordinates.device != features.device:
        return coordinates.to(features.device) if profile.is_old() else coordinates
    return coordinates


def moved(features: torch.Tensor, coordinates: Any, device: Any) -> tuple[torch.Tensor, Any]:
    """Features and coordinates on `device` (None: where they are)."""
    if device is None:
        return features, coordinates
    if isinstance(coordinates, torch.Tensor):
        coordinates = coordinates.to(device)
    return features.to(device), coordinates
