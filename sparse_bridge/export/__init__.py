"""Networks of spconv layers as files for programs without Python.

`export_package(model, inputs, folder)` writes a folder for C++ programs on the CPU;
`export_gpu_package(model, inputs, folder, targets=..., rows=...)` one for C programs on a GPU, whose
file `load_package(path)` plays from Python.

ONNX files for Autoware's TensorRT plugins:

`export_onnx(model, x, path)` writes one; `evaluate(path, inputs)` runs one without TensorRT;
`rulebook_inputs(path, indices)` computes pair tables that are inputs of a file. Needs the extra
`onnx`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedError
from ..kernels.runtime import target as targets
from .evaluation import evaluate
from .onnx_file import export_onnx
from .package import export_package
from .player.library import Package as load_package
from .plugin_checks import ExportError
from .rulebooks import rulebook_inputs

if TYPE_CHECKING:
    from .player.folder import export_gpu_package

__all__ = [
    "ExportError",
    "evaluate",
    "export_gpu_package",
    "export_onnx",
    "export_package",
    "load_package",
    "rulebook_inputs",
]


def _triton_here(version: tuple[int, ...] | None) -> str:
    """What is wrong with it, and what to do."""
    if version is None:
        return "none is installed here, as torch for CPUs brings none. On Linux: pip install triton"
    if version < (3, 5):
        return f"here is {'.'.join(map(str, version))}. Write the package with a newer torch, or: pip install -U triton"
    return "here it interprets kernels. Unset TRITON_INTERPRET"


def __getattr__(name: str) -> Any:
    """What needs Triton is imported when it is asked for."""
    if name == "export_gpu_package":
        version = targets.triton_version()
        if version is None or version < (3, 5) or targets.interpreted():
            raise UnsupportedError(
                f"packages for GPUs are compiled by Triton 3.5 or newer; {_triton_here(version)}. No GPU is needed."
            )
        from .player.folder import export_gpu_package

        return export_gpu_package
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
