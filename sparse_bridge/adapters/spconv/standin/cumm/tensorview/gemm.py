"""The part of `cumm.tensorview.gemm` that projects use."""

from cumm.core_cc.tensorview_bind import Activation as Activation
