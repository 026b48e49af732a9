"""In which dtypes kernels multiply, and how."""

from __future__ import annotations

import torch

from ... import settings
from ...kernels.runtime.target import Target
from ..geometry.weights import WeightLayout

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def product_precision(
    target: Target, dtype: torch.dtype, precision: str, wgrad: bool = False
) -> str:
    """What kernels do for a layer that asks for "ieee" or "tf32" products of `dtype`: "ieee",
    "tf32" or "tf32x3".

    TF32 is leave to round, not an order: targets without it compute fp32. fp32 itself may be the
    sum of three TF32 products ("tf32x3"; Ootomo and Yokota 2022), as exact and much faster where
    `Target.splits_fp32`; not in wgrad, where turning both operands around takes what it saves.
    """
    if dtype != torch.float32:
        return "ieee"
    if precision == "tf32" and target.has_tf32:
        return "tf32"
    split = target.splits_fp32 and not wgrad and settings.get().fp32 == "auto"
    return "tf32x3" if split else "ieee"


_ROWS_PAY = 64 * 64  # channels in times channels out


def reads_rows(target: Target, precision: str, w: WeightLayout) -> bool:
    """Whether a weight is copied so that its input channels lie next to each other.

    Some matrix instructions (Hopper's) read the second operand of TF32 products only so; anything
    else is turned around block by block, which costs more than the product.
    """
    if precision == "ieee" or abs(w.strides[1]) == 1:
        return False
    return target.generation.tf32_reads_rows and w.c_in * w.c_out >= _ROWS_PAY
