"""PyG (`torch_geometric`): graph convolution on relations, `RGCNConv` and `FastRGCNConv`.

Only where it is named, `enable("torch_geometric")`, and only as a patch: there is no stand-in.
`core.functional.RelationalConv` is the same layer without PyG.
"""

from __future__ import annotations

from pathlib import Path

from ...errors import LifecycleError
from ..base import Framework

__all__ = ["ADAPTER", "TorchGeometricAdapter"]


class TorchGeometricAdapter(Framework):
    """What the life cycle needs to know about PyG."""

    name = "torch_geometric"
    title = "PyG"
    packages = ("torch_geometric",)
    main = "torch_geometric.nn"
    standin_root = Path(__file__).parent / "standin"
    versions = ">=2.3"

    def begin(self, mode: str, profile: str | None) -> None:
        """Raises LifecycleError where PyG cannot be patched."""
        if mode == "standin":
            raise LifecycleError(
                "torch_geometric is not installed or does not import, and has no stand-in; install "
                "it, or use sparse_bridge.core.functional.RelationalConv, which is the same layer."
            )


ADAPTER = TorchGeometricAdapter()
