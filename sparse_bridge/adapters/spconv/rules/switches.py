"""spconv's switches with an effect here: attributes of `spconv.constants` that programs assign.

They are read where they matter, from the spconv that is imported, so that an assignment at any time
counts.
"""

from __future__ import annotations

import sys
from typing import Any

from ....errors import ContractError, UnsupportedError

__all__ = ["allow_tf32", "check_layout", "saved_layout", "sorts_masks", "uses_direct_table"]

_LAYOUTS = ("", "KRSC", "RSKC", "RSCK")


def _value(name: str, otherwise: Any, constants: Any = None) -> Any:
    """constants: the module, if not that of the spconv that is imported."""
    module = sys.modules.get("spconv.constants") if constants is None else constants
    return getattr(module, name, otherwise)


def allow_tf32() -> bool:
    """Whether products of fp32 may be in TF32."""
    return bool(_value("SPCONV_ALLOW_TF32", False))


def uses_direct_table(constants: Any = None) -> bool:
    """Whether new rows may come in any order: now, and when `spconv.pytorch.ops` was imported,
    which is when spconv reads it."""
    imported = getattr(sys.modules.get("spconv.pytorch.ops"), "SPCONV_USE_DIRECT_TABLE", True)
    return bool(imported and _value("SPCONV_USE_DIRECT_TABLE", True, constants))


def sorts_masks() -> bool:
    """Whether tables come with their rows ordered by mask."""
    return bool(_value("SPCONV_DO_SORT", True))


def saved_layout() -> str:
    """The layout of weights in checkpoints, "" where nobody said. Raises ContractError."""
    layout = _value("SAVED_WEIGHT_LAYOUT", "")
    if layout not in _LAYOUTS:
        raise ContractError(f"SPCONV_SAVED_WEIGHT_LAYOUT is {layout!r}; expected {', '.join(_LAYOUTS[1:])}.")
    return str(layout)


def check_layout(module: Any) -> None:
    """Raise UnsupportedError where switches ask for weights of another layout than KRSC.

    module: that holds the switches.
    """
    for name, usual in (("ALL_WEIGHT_IS_KRSC", True), ("FILTER_HWIO", False)):
        if bool(getattr(module, name, usual)) is not usual:
            raise UnsupportedError(
                f"{module.__name__}.{name} is {not usual}; weights are [C_out, *kernel, C_in] "
                "here. Leave the switch as it is, and set SPCONV_SAVED_WEIGHT_LAYOUT to load "
                "weights of another layout."
            )
