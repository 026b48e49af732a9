"""What was compiled."""

from spconv.core_cc.cumm import common, conv, gemm

__all__ = ["common", "conv", "gemm"]
