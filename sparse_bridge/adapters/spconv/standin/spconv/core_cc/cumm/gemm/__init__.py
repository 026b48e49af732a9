"""Kernels of cumm for gemms."""

from spconv.core_cc.cumm.gemm import main as main
