"""Checks of the constructors of tensors."""

from __future__ import annotations

from typing import Any

import torch

from ...core.arguments import expect_tensors
from ...errors import ContractError
from . import profile


def check_features(features: Any) -> None:
    """Raises: ContractError unless features are a tensor [N, C]."""
    expect_tensors("SparseTensor", features=features)
    if features.ndim != 2:
        raise ContractError(f"features have shape {list(features.shape)}; expected [N, C].")


def check_pair(features: torch.Tensor, coordinates: Any) -> None:
    """Raises: ContractError, CoordinateTypeError unless coordinates [N, D + 1] fit the features."""
    expect_tensors("SparseTensor", coordinates=coordinates)
    if coordinates.ndim != 2 or coordinates.shape[1] < 2:
        raise ContractError(
            f"coordinates have shape {list(coordinates.shape)}; expected [N, D + 1], batch index first."
        )
    if features.shape[0] != coordinates.shape[0]:
        raise ContractError(
            f"{features.shape[0]} rows of features for {coordinates.shape[0]} coordinates; both must have N rows."
        )
    if features.device != coordinates.device:
        raise ContractError(
            f"features on {features.device}, coordinates on {coordinates.device}; give device=, which moves both."
        )


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
