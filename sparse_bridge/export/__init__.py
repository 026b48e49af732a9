"""Networks of spconv layers as ONNX files for Autoware's TensorRT plugins.

`export_onnx(model, x, path)` writes one; `evaluate(path, inputs)` runs one without TensorRT.
Needs the extra `onnx`.
"""

from __future__ import annotations

from .evaluation import evaluate
from .onnx_file import ExportError, export_onnx

__all__ = ["ExportError", "evaluate", "export_onnx"]
