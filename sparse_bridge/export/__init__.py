"""Networks of spconv layers as files for programs without Python.

`export_package(model, inputs, folder)` writes a folder for C++ programs on the CPU.

ONNX files for Autoware's TensorRT plugins:

`export_onnx(model, x, path)` writes one; `evaluate(path, inputs)` runs one without TensorRT;
`rulebook_inputs(path, indices)` computes pair tables that are inputs of a file. Needs the extra
`onnx`.
"""

from __future__ import annotations

from .evaluation import evaluate
from .onnx_file import export_onnx
from .package import export_package
from .plugin_checks import ExportError
from .rulebooks import rulebook_inputs

__all__ = ["ExportError", "evaluate", "export_onnx", "export_package", "rulebook_inputs"]
