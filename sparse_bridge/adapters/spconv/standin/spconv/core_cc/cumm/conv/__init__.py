"""Kernels of cumm for convs."""

from spconv.core_cc.cumm.conv import main as main
