"""Names of FlexGEMM's kernels."""

from . import cuda, triton

__all__ = ["cuda", "triton"]
