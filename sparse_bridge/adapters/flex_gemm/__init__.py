"""FlexGEMM 1.x (`flex_gemm`): sparse convolution and voxel sampling on plain tensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base import Framework, Patch

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
    versions = "1.x"

    def patches(self) -> list[Patch]:
        """Seams of the installed FlexGEMM. Raises UnsupportedError for another generation."""
        from .patch import patches

        return patches()


ADAPTER = FlexGemmAdapter()


def __getattr__(name: str) -> Any:
    if name in ("from_core", "to_core"):  # at first use, because they need torch
        from . import interchange

        return getattr(interchange, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
