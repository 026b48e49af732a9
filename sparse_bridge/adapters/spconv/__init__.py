"""spconv 2.3 (with the conveniences of 1.x)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base import Framework, Patch

if TYPE_CHECKING:
    from .interchange import from_core, to_core

__all__ = ["ADAPTER", "SpconvAdapter", "from_core", "to_core"]


class SpconvAdapter(Framework):
    """What the life cycle needs to know about spconv."""

    name = "spconv"
    title = "spconv"
    packages = ("spconv", "cumm")
    main = "spconv.pytorch"
    tensor = ("spconv.pytorch", "SparseConvTensor")
    standin_root = Path(__file__).parent / "standin"
    versions = ">=2.2,<2.4"

    def patches(self) -> list[Patch]:
        """Seams of the installed spconv. Raises UnsupportedError outside the supported versions."""
        from .patch import patches

        return patches()

    def version(self) -> str | None:
        """Version of the spconv that is imported, real or stand-in."""
        module = sys.modules.get("spconv")
        return getattr(module, "__version__", None)


ADAPTER = SpconvAdapter()


def __getattr__(name: str) -> Any:
    if name in ("from_core", "to_core"):  # at first use, because they need torch
        from . import interchange

        return getattr(interchange, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
