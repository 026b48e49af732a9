"""spconv 2.3 (with the conveniences of 1.x)."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from ..base import Framework, interchange_of

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
    other_names = MappingProxyType({"spconv_triton": "spconv"})


ADAPTER = SpconvAdapter()
__getattr__ = interchange_of(__name__)
