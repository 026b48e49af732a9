"""FlexGEMM 1.x and 2.0 (`flex_gemm`): sparse convolution and voxel sampling on plain tensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base import Framework, interchange_of

if TYPE_CHECKING:
    from .interchange import from_core, to_core

__all__ = ["ADAPTER", "FlexGemmAdapter", "from_core", "to_core"]


class FlexGemmAdapter(Framework):
    """What the life cycle needs to know about FlexGEMM."""

    name = "flex_gemm"
    title = "FlexGEMM"
    packages = ("flex_gemm",)
    main = "flex_gemm"
    # It has no tensor class; this tuple names what its functions take.
    tensor = ("sparse_bridge.adapters.flex_gemm.interchange", "Voxels")
    standin_root = Path(__file__).parent / "standin"
    versions = "1.x, 2.0"
    profiles = ("1", "2.0")

    def takes(self, x: Any) -> bool:
        """A tuple of features, coordinates and a shape of any kind, too."""
        parts = x[:2] if isinstance(x, tuple) and len(x) == 3 else ()
        return super().takes(x) or [hasattr(part, "device") for part in parts] == [True, True]

    def distribution_version(self, package: str) -> str | None:
        """What releases of either generation call themselves; they have no `__version__`."""
        return "1.0.0"

    def begin(self, mode: str, profile: str | None) -> None:
        """Choose the generation. Raises LifecycleError where another one is installed than asked
        for, and patched."""
        from . import profile as profiles

        root = Path(__file__).parent / "standin"
        chosen = profiles.choose(mode, profile)
        self.standin_root = root / "v2" if chosen == "2.0" else root


ADAPTER = FlexGemmAdapter()
__getattr__ = interchange_of(__name__)
