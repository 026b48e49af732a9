"""What TorchScript is told of sparse layers."""

from __future__ import annotations

from typing import Any, NoReturn

from ...errors import UnsupportedError


def refuse_script(layer: Any) -> NoReturn:
    """The `__prepare_scriptable__` of a layer, which `torch.jit.script` calls first."""
    raise UnsupportedError(
        f"torch.jit.script was given a {type(layer).__name__}; TorchScript has no sparse tensors. "
        "Use torch.export or torch.compile (docs/compile.md), or "
        "sparse_bridge.export.export_onnx (docs/export.md)."
    )
