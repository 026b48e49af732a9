"""The surface of the spconv that is installed, as a table; asked of Python, not of its source.

`python -m tests.surface.record` writes `sparse_bridge/surface/tables/spconv-<version>.txt`.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import pkgutil
import sys
import types
from typing import Any

import torch

from sparse_bridge.surface.table import FOLDER

# Command lines, and what generates upstream's C++ sources while it is built.
_SKIPPED = ("spconv.benchmark", "spconv.gencode", "spconv.csrc", "spconv.algocore", "spconv.build")
# Modules that a build without CUDA cannot import.
_CUDA = """
[spconv.algo]
GEMM CONV GEMM_CPP CONV_CPP

[spconv.utils]
Point2VoxelGPU1d Point2VoxelGPU2d Point2VoxelGPU3d Point2VoxelGPU4d

[cumm.tensorview]
from_numpy zeros empty full measure_and_print CUDAKernelTimer
Tensor
    numpy numpy_view shape dtype device cpu cuda clone
gemm.Activation
    None_ ReLU Sigmoid LeakyReLU

[spconv.pytorch.quantization]
get_spconv_backend_config(additional_bns=None)
get_spconv_prepare_custom_config(additional_bns=None)
get_spconv_convert_custom_config()
prepare_spconv_torch_inference(with_linear)
get_default_spconv_trt_ptq_qconfig(backend, version)
get_default_spconv_trt_qat_qconfig(backend, version)
get_default_spconv_qconfig_mapping(is_qat, backend="fbgemm", version=0)
get_spconv_fmod_to_qat_mapping() get_spconv_qat_to_static_mapping()
quantize_per_tensor remove_conv_add_dq transform_qdq

[spconv.pytorch.quantization.core]
quantized_add

[spconv.pytorch.quantization.utils]
fuse_spconv_bn_weights fuse_spconv_bn_eval fuse_spconv_act_eval

[spconv.pytorch.quantization.intrinsic]
SpconvReLUNd SpconvBnNd SpconvBnReLUNd SpconvBnAddReLUNd SpconvAddReLUNd

[spconv.pytorch.quantization.intrinsic.qat]
SparseConv SparseConvReLU SparseConvAddReLU SparseConvBn SparseConvBnReLU SparseConvBnAddReLU

[spconv.pytorch.quantization.intrinsic.quantized]
SparseConvReLU SparseConvAddReLU LinearPerChannelWeightReLU

[spconv.pytorch.quantization.quantized]
SparseConv LinearPerChannelWeight

[spconv.pytorch.quantization.quantized.reference]
SpConv
"""
# Where constants live; elsewhere they are only imported.
_CONSTANTS = ("spconv", "spconv.constants", "spconv.cppconstants", "spconv.pytorch.constants")
_PLAIN = (bool, int, float, str, list, dict, tuple, set, frozenset, enum.Enum)
_WIDTH = 100


def record() -> str:
    """The text of the table."""
    import spconv

    names = ["spconv"]
    for found in pkgutil.walk_packages(spconv.__path__, "spconv.", onerror=lambda _: None):
        if not found.name.startswith((*_SKIPPED, "spconv.core_cc")):
            names.append(found.name)
    lines = [f"# spconv {spconv.__version__}, recorded by tests/surface/record.py"]
    for name in sorted(names):
        try:
            module = importlib.import_module(name)
        except ImportError:  # needs a build for CUDA
            continue
        lines += ["", f"[{name}]", *_module(module)]
    lines += _compiled(importlib.import_module("spconv.core_cc"))
    return "\n".join(lines) + "\n" + _CUDA


def _compiled(module: types.ModuleType) -> list[str]:
    """Names of the compiled classes and of their members, whose parameters cannot be asked for."""
    lines, below = [], []
    for name, value in sorted(vars(module).items()):
        if isinstance(value, types.ModuleType) and not name.startswith("_"):
            below += _compiled(value)
        elif isinstance(value, type):
            lines.append(name)
            lines += _wrapped([m for m in sorted(vars(value)) if not m.startswith("_")], "    ")
    return (["", f"[{module.__name__}]", *lines] if lines else []) + below


def _module(module: types.ModuleType) -> list[str]:
    classes, plain = [], []
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") and name != "__version__":
            continue
        if isinstance(value, type):
            if _ours(module, value):
                classes.append((name, value))
        elif callable(value):
            if _ours(module, value):
                plain.append(name + _parameters(value))
        elif isinstance(value, _PLAIN) and (
            module.__name__ in _CONSTANTS or isinstance(value, (set, frozenset))
        ):
            plain.append(name)
    lines = _wrapped(plain, "")
    for name, kind in classes:
        lines.append(name + ("" if issubclass(kind, enum.Enum) else _parameters(kind)))
        lines += _wrapped(_members(kind), "    ")
    return lines


def _ours(module: types.ModuleType, value: Any) -> bool:
    """Defined in the module itself, or brought into a package's namespace from below."""
    home = getattr(value, "__module__", None) or ""
    package = module.__name__ + "."
    return home == module.__name__ or (hasattr(module, "__path__") and home.startswith(package))


def _members(kind: type) -> list[str]:
    if issubclass(kind, enum.Enum):
        return list(kind.__members__)
    if issubclass(kind, torch.autograd.Function):
        return ["apply" + _parameters(kind.forward).replace("(ctx, ", "(", 1)]
    found = []
    for name, value in sorted(vars(kind).items()):
        if name.startswith("_"):
            continue
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        found.append(name + (_parameters(value) if inspect.isfunction(value) else ""))
    return found


def _parameters(value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parts, starred = [], False
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls") and not parts:
            continue
        kinds = inspect.Parameter
        if parameter.kind is kinds.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        stars = {kinds.VAR_POSITIONAL: "*", kinds.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        starred = starred or stars == "*"
        default = "" if parameter.default is kinds.empty else f"={_default(parameter.default)}"
        parts.append(f"{stars}{parameter.name}{default}")
    return f"({', '.join(parts)})"


def _default(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (list, tuple)) and all(isinstance(v, (int, float, str)) for v in value):
        return repr(value)
    return "..."


def _wrapped(names: list[str], indent: str) -> list[str]:
    lines: list[str] = []
    for name in names:
        if "(" in name or not lines or "(" in lines[-1] or len(lines[-1]) + len(name) > _WIDTH:
            lines.append(indent + name)
        else:
            lines[-1] += " " + name
    return lines


if __name__ == "__main__":
    text = record()
    version = text.split()[2].rstrip(",")
    (FOLDER / f"spconv-{version}.txt").write_text(text, encoding="utf-8")
    sys.stdout.write(f"{len(text.splitlines())} lines\n")
