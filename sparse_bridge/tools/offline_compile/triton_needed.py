"""Whether Triton here can compile for absent GPUs: asked before kernels, which import it."""

from __future__ import annotations

from ...errors import UnsupportedError
from ...kernels.runtime.target import triton_version


def require_triton() -> None:
    """Raise UnsupportedError where Triton cannot compile for absent GPUs."""
    version = triton_version()
    if version is None or version < (3, 5):
        text = "none" if version is None else ".".join(map(str, version))
        raise UnsupportedError(
            "the compile check needs Triton 3.5 or newer, which brings a linker for AMD, and found "
            f"{text}; on a machine without a GPU: pip install triton."
        )
