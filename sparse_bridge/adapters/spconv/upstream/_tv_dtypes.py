"""dtype codes of `cumm.tensorview` and their numpy and torch counterparts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ....errors import DataTypeError


class TvDataTypeError(DataTypeError, RuntimeError, ValueError):
    """A dtype that a tv.Tensor cannot hold here; RuntimeError or ValueError upstream."""


CODES = {
    "float32": 0,
    "int32": 1,
    "int16": 2,
    "int8": 3,
    "float64": 4,
    "bool_": 5,
    "uint8": 6,
    "float16": 7,
    "int64": 8,
    "uint16": 9,
    "uint32": 10,
    "uint64": 11,
    "bfloat16": 12,
    "tf32": 13,
    "custom16": 100,
    "custom32": 101,
    "custom48": 102,
    "custom64": 103,
    "custom80": 104,
    "custom96": 105,
    "custom128": 106,
    "unknown": -1,
}

_NAMES = {code: name for name, code in CODES.items()}
NUMPY = {
    code: np.dtype(name.rstrip("_"))
    for name, code in CODES.items()
    if name not in ("bfloat16", "tf32", "unknown") and not name.startswith("custom")
}
FROM_NUMPY = {dtype: code for code, dtype in NUMPY.items()}
# tf32 is float32 storage.
TO_NUMPY = {**NUMPY, CODES["tf32"]: NUMPY[CODES["float32"]]}
_TORCH = {
    code: getattr(torch, dtype.name)
    for code, dtype in NUMPY.items()
    if hasattr(torch, dtype.name)  # the wider unsigned types came to torch late
}
_TORCH[CODES["bfloat16"]] = torch.bfloat16
_FROM_TORCH = {dtype: code for code, dtype in _TORCH.items()}


def code_of(dtype: Any) -> int:
    """The code of a code, a torch dtype or anything numpy takes for a dtype."""
    if isinstance(dtype, int) and not isinstance(dtype, bool) and dtype in _NAMES:
        return dtype
    code = _FROM_TORCH.get(dtype) if isinstance(dtype, torch.dtype) else None
    if code is None and not isinstance(dtype, (int, torch.dtype)):
        code = FROM_NUMPY.get(np.dtype(dtype))
    if code is None:
        raise TvDataTypeError(f"unknown dtype {dtype!r}; a tv.Tensor holds {', '.join(_NAMES[c] for c in NUMPY)}")
    return code


def to_numpy_dtype(code: int) -> np.dtype[Any]:
    dtype = TO_NUMPY.get(code)
    if dtype is None:
        raise TvDataTypeError(f"dtype {_NAMES.get(code, code)!r} has no numpy counterpart")
    return dtype


def to_torch_dtype(code: int) -> torch.dtype:
    dtype = _TORCH.get(CODES["float32"] if code == CODES["tf32"] else code)
    if dtype is None:
        raise TvDataTypeError(f"dtype {_NAMES.get(code, code)!r} has no torch counterpart")
    return dtype


def itemsize(code: int) -> int:
    """Bytes per element."""
    name = _NAMES.get(code, "unknown")
    if name.startswith("custom"):
        return int(name[len("custom") :]) // 8
    return 2 if name == "bfloat16" else to_numpy_dtype(code).itemsize


def bitsize(code: int) -> int:
    """Bits that hold the values of one element; -1 for no dtype."""
    return {CODES["bool_"]: 1, CODES["unknown"]: -1}.get(code) or 8 * itemsize(code)
