"""Module switches of FlexGEMM, read at every call from where its users assign them."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

from ...core.conv.plan import ConvForm
from ...core.device.torch_compat import allows_tf32, matmul_precision
from ..base import Patch
from .errors import ArgumentValueError

__all__ = ["ALGORITHMS", "algorithm", "allow_tf32", "form", "row_order", "switch"]

ALGORITHMS = (
    "explicit_gemm",
    "implicit_gemm",
    "implicit_gemm_splitk",
    "masked_implicit_gemm",
    "masked_implicit_gemm_splitk",
)
_FORMS = {tf32: ConvForm("ovi", 1, "tf32" if tf32 else "ieee") for tf32 in (False, True)}
_SPCONV = "flex_gemm.ops.spconv"
_CONFIG = "flex_gemm.kernels.triton.spconv.config"


def algorithm(requested: Any = None) -> str:
    """`requested`, or `ops.spconv.ALGORITHM`, whose setter checks nothing. Raises ArgumentValueError.

    All five give the same answers here: the engine chooses its own dataflow.
    """
    where = "flex_gemm.ops.spconv.ALGORITHM" if requested is None else "algorithm"
    if requested is None:
        requested = getattr(sys.modules.get(_SPCONV), "ALGORITHM", ALGORITHMS[-1])
    name = str(requested)
    if name not in ALGORITHMS:
        raise ArgumentValueError(f"{where} is {name!r}; expected one of {', '.join(ALGORITHMS)}.")
    return name


def row_order() -> int:
    """`ops.spconv.SERIALIZATION_MODE` of generated coordinates: 0 by row-major key, 1 by Z-curve, 2
    by Hilbert curve. `OUT_COORD_ALGO`, of two ways to the same rows, is checked.

    Raises ArgumentValueError.
    """
    _one_of("OUT_COORD_ALGO", (0, 1))
    return _one_of("SERIALIZATION_MODE", (0, 1, 2))


def _one_of(name: str, allowed: tuple[int, ...]) -> int:
    """The integer that somebody assigned to a name of `ops.spconv`, or its default, 0."""
    value = getattr(sys.modules.get(_SPCONV), name, 0)
    if value not in allowed:
        raise ArgumentValueError(
            f"flex_gemm.ops.spconv.{name} is {value!r}; expected one of {', '.join(map(str, allowed))}."
        )
    return int(value)


def allow_tf32() -> bool:
    """`kernels.triton.spconv.config.allow_tf32` where somebody assigned it, else torch's switch.

    (FlexGEMM itself allows TF32 by default.)
    """
    switch = getattr(sys.modules.get(_CONFIG), "allow_tf32", None)
    if switch is not None:
        return bool(switch)
    return allows_tf32() if torch.compiler.is_compiling() else matmul_precision() == "tf32"


def form(requested: Any = None, tf32: bool | None = None) -> ConvForm:
    """How convolutions multiply under the switches, or under what a call says (algorithm, TF32).
    Raises ArgumentValueError."""
    algorithm(requested)
    return _FORMS[allow_tf32() if tf32 is None else bool(tf32)]


def switch(module: str, name: str, versions: str) -> list[Patch]:
    """The patch that turns the TF32 default of an installed FlexGEMM, True, into None: torch's
    switch decides, until somebody assigns the name. False stays."""
    try:
        owner: Any = importlib.import_module(module)
    except ImportError:
        return []
    if getattr(owner, name, None) is not True:
        return []
    return [Patch(owner, name, None, "TF32 follows torch until it is assigned", versions)]
