"""What every layer needs: its kernel as data, checks of its features, the key of its output."""

from __future__ import annotations

import dataclasses

import torch

from .errors import FeatureShapeError, FeatureTypeError, TensorDeviceError
from .geometry import Region
from .registry import Key, MapRegistry

__all__ = ["KernelSpec", "check_features", "output_key", "transposed_key"]


@dataclasses.dataclass(frozen=True)
class KernelSpec:
    """Kernel of a layer: offsets, size and stride per axis, whether it makes new coordinates."""

    region: Region
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    expand: bool = False

    @property
    def strided(self) -> bool:
        return any(s > 1 for s in self.stride)

    @property
    def cells(self) -> bool:
        """As a pool: every input belongs to one cell of the stride, instead of to windows."""
        return self.kernel_size == self.stride


def check_features(registry: MapRegistry, key: Key, features: torch.Tensor, what: str) -> None:
    """Features [N, C] must be floating point, and aligned with the map under `key`.

    Raises: FeatureShapeError, FeatureTypeError, TensorDeviceError, KeyStateError.
    """
    grid = registry.grid(key)
    if features.ndim != 2 or features.shape[0] != grid.n_rows:
        raise FeatureShapeError(
            f"{what} got features of shape {list(features.shape)} for a coordinate map of "
            f"{grid.n_rows} rows; expected [{grid.n_rows}, C]."
        )
    if not features.is_floating_point():
        raise FeatureTypeError(
            f"{what} got {features.dtype} features; it takes floating point (use x.float())."
        )
    if features.device != grid.coords.device:
        raise TensorDeviceError(
            f"{what} got features on {features.device}, its coordinates are on "
            f"{grid.coords.device}; build the tensor with device=."
        )


def output_key(registry: MapRegistry, in_key: Key, given: Key | None, spec: KernelSpec) -> Key:
    """Where a convolution or pool writes: the given map, an expanded one, or that of the stride."""
    if given is not None:
        return given
    if spec.expand:
        return registry.expanded(in_key, spec.region, spec.stride)
    return registry.strided(in_key, spec.stride)


def transposed_key(registry: MapRegistry, in_key: Key, given: Key | None, spec: KernelSpec) -> Key:
    """Where a transposed layer writes: the given map, the one known at the finer stride, or new."""
    if given is not None:
        return given
    if not spec.expand:
        if not spec.strided:
            return in_key
        known = (registry.finer_stride(in_key, spec.stride), "")
        if known in registry.grids:
            return known
    return registry.generated(in_key, spec.region, spec.stride)
