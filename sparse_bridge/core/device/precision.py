"""In which dtypes kernels multiply, and how."""

from __future__ import annotations

import torch

from ... import settings, state
from ...kernels.runtime.target import Target
from ..geometry.weights import WeightLayout
from .torch_compat import allows_fp16_sums

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
fp16_sums = False  # torch's switch for them, as it was last asked
_unsplit: set[str] = set()  # architectures on which the split product failed the self-check


def forbid_split(target: Target) -> None:
    """fp32 products of this architecture are IEEE from now on: the sum of three TF32 products came
    out wrong there (some releases miscompile chained `tl.dot` for Blackwell)."""
    _unsplit.add(target.arch)


@state.owns
def reset() -> None:
    """Forget what `forbid_split` was told, and torch's switch."""
    global fp16_sums
    _unsplit.clear()
    fp16_sums = False


def follow_torch() -> None:
    """Take over torch's switch, which has been turned: what was decided before holds no longer."""
    global fp16_sums
    fp16_sums = allows_fp16_sums()
    settings.changed()


def requested_precision(dtype: torch.dtype, precision: str) -> str:
    """The precision of a layer's products of `dtype` under torch's switch for sums in fp16, as it was last asked:
    "half" for fp16, unless the layer itself wants fp32 sums ("wide")."""
    return "half" if fp16_sums and dtype == torch.float16 and precision != "wide" else precision


def product_precision(target: Target, dtype: torch.dtype, precision: str, wgrad: bool = False) -> str:
    """What kernels do for a layer that asks for "ieee", "tf32", "half" or "wide" products of `dtype`:
    "ieee", "tf32", "tf32x3" or "half". ("wide" is "ieee" whatever torch's switches say.)

    TF32 is leave to round, not an order: targets without it compute fp32. fp32 itself may be the
    sum of three TF32 products ("tf32x3"; Ootomo and Yokota 2022), as exact and much faster where
    `Target.splits_fp32`; not in wgrad, where turning both operands around takes what it saves.
    """
    if dtype != torch.float32:
        # Leave to add fp16 products up in fp16, too; of use where that doubles the rate.
        half = precision == "half" and dtype == torch.float16 and target.adds_in_fp16
        return "half" if half and not wgrad else "ieee"
    if precision == "tf32" and target.has_tf32:
        return "tf32"
    split = target.splits_fp32 and not wgrad and settings.get().fp32 == "auto"
    split = split and target.arch not in _unsplit
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
