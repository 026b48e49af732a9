"""Tensors of the voxelizers and the activation enum, under cumm's names."""

from contextlib import nullcontext as nullcontext

from cumm.core_cc import tensorview_bind as tensorview_bind
from cumm.tensorview import gemm as gemm
from cumm.tensorview import utils as utils

from sparse_bridge.adapters.spconv.upstream.tensorview import *  # noqa: F403

Activation = gemm.Activation
