"""Sums over the rows of features: the gradient of a bias."""

from __future__ import annotations

import torch

from ...kernels.runtime.target import Target
from .precision import KERNEL_DTYPES


def column_sums(
    x: torch.Tensor, dtype: torch.dtype, target: Target | None, count: torch.Tensor | None = None
) -> torch.Tensor:
    """[C] in `dtype` from x [N, C], contiguous; summed in fp32, or in fp64 where x is.

    target: whose kernels do it; None for torch. The same sums in the same order at every call.
    count: int32 [1] on x's device, one less than the rows that are summed up; None: all.
    """
    if target is None or dtype not in KERNEL_DTYPES or not x.numel():
        if count is not None:
            behind = torch.arange(len(x), dtype=count.dtype, device=x.device) > count
            x = x.masked_fill(behind[:, None], 0)
        wide = x.dtype if x.dtype == torch.float64 else torch.float32
        return x.sum(0, dtype=wide).to(dtype)
    from ...kernels.ops.column_sum import column_sum

    return column_sum(x, torch.empty(x.shape[1], dtype=dtype, device=x.device), target, count)
