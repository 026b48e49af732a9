"""MinkowskiEngine 0.5 (with names of 0.4)."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..base import Framework, Patch
from . import patch

if TYPE_CHECKING:
    from ...core.geometry.sparse_data import SparseData

__all__ = ["ADAPTER", "MinkowskiAdapter", "from_core", "to_core"]

# Upstream puts its own folder on sys.path and imports itself by these names, and so do projects.
_FLAT = (
    "MinkowskiBroadcast", "MinkowskiChannelwiseConvolution", "MinkowskiCommon",
    "MinkowskiConvolution", "MinkowskiCoordinateManager", "MinkowskiFunctional",
    "MinkowskiInterpolation", "MinkowskiKernelGenerator", "MinkowskiNetwork",
    "MinkowskiNonlinearity", "MinkowskiNormalization", "MinkowskiOps", "MinkowskiPooling",
    "MinkowskiPruning", "MinkowskiSparseTensor", "MinkowskiTensor", "MinkowskiTensorField",
    "MinkowskiUnion", "sparse_matrix_functions",
)  # fmt: skip
# Names that others use as well: answered only where nobody else does.
_SHARED = ("diagnostics", "modules", "utils")


class MinkowskiAdapter(Framework):
    """What the life cycle needs to know about MinkowskiEngine; always the stand-in, see `patch`."""

    name = "minkowski"
    title = "MinkowskiEngine"
    packages = ("MinkowskiEngine", "MinkowskiEngineBackend")
    main = "MinkowskiEngine"
    tensor = ("MinkowskiEngine", "SparseTensor")
    standin_root = Path(__file__).parent / "standin"
    versions = "0.5"
    patchable = False
    aliases = MappingProxyType({name: f"MinkowskiEngine.{name}" for name in _FLAT})
    weak_aliases = MappingProxyType({name: f"MinkowskiEngine.{name}" for name in _SHARED})

    def patches(self) -> list[Patch]:
        """Raises LifecycleError: there are none."""
        return patch.patches()


ADAPTER = MinkowskiAdapter()


def to_core(x: Any) -> SparseData:
    """A MinkowskiEngine SparseTensor as plain tensors; see `interchange.to_core`."""
    from .interchange import to_core

    return to_core(x)


def from_core(data: SparseData, like: Any = None) -> Any:
    """Plain tensors as a MinkowskiEngine SparseTensor; see `interchange.from_core`."""
    from .interchange import from_core

    return from_core(data, like)
