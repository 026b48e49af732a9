"""Pooling layers."""

import math

import torch
from spconv import pytorch as spconv  # noqa: F401 - the name is upstream's
from spconv.core import ConvAlgo
from spconv.cppconstants import CPU_ONLY_BUILD as CPU_ONLY_BUILD
from spconv.pytorch import functional as Fsp  # noqa: F401 - the name is upstream's
from spconv.pytorch import ops as ops
from spconv.pytorch.core import ImplicitGemmIndiceData as ImplicitGemmIndiceData
from spconv.pytorch.core import IndiceData as IndiceData
from spconv.pytorch.core import expand_nd
from spconv.pytorch.modules import SparseModule
from spconv.tools import nullcontext as nullcontext

from sparse_bridge.adapters.spconv.keys import checked_algo, checked_key
from sparse_bridge.adapters.spconv.pool import avg_pool_forward, global_pool_forward, max_pool_forward
from sparse_bridge.adapters.spconv.tracing import one_node
from sparse_bridge.adapters.spconv.upstream.constructors import REQUIRED, takes

_MAX_NUM_VOXELS_DURING_TRAINING = "max_num_voxels_during_training"


class _SparsePool(SparseModule):
    """Geometry of a local pool; outputs follow the rule of regular convolutions."""

    def __init__(
        self,
        ndim,
        kernel_size=3,
        stride=1,
        padding=0,
        dilation=1,
        indice_key=None,
        subm=False,
        algo=None,
        record_voxel_count=False,
        name=None,
    ):
        super().__init__(name=name)
        if algo is None:
            volume = kernel_size if isinstance(kernel_size, int) else math.prod(kernel_size)
            algo = ConvAlgo.MaskImplicitGemm if volume <= 128 else ConvAlgo.Native
        self.ndim = ndim
        self.kernel_size = expand_nd(ndim, kernel_size)
        self.stride = list(self.kernel_size) if stride is None else expand_nd(ndim, stride)
        self.padding = expand_nd(ndim, padding)
        self.dilation = expand_nd(ndim, dilation)
        self.subm = subm
        self.record_voxel_count = record_voxel_count
        self.indice_key = checked_key(indice_key)
        self.algo = checked_algo(algo, ConvAlgo)
        if record_voxel_count and not subm:
            self.register_buffer(_MAX_NUM_VOXELS_DURING_TRAINING, torch.zeros(1, dtype=torch.int32))

    def extra_repr(self):
        return (
            f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}, "
            f"dilation={self.dilation}, algo={self.algo}"
        )

    def get_max_num_voxels(self):
        return getattr(self, _MAX_NUM_VOXELS_DURING_TRAINING, None)


class _OfDimension:
    """Constructor of the classes that fix the dimension; `stride=None` means the kernel size."""

    _ndim: int

    @takes(
        _SparsePool.__init__,
        "kernel_size stride padding dilation indice_key algo record_voxel_count name",
        kernel_size=REQUIRED,
        stride=None,
    )
    def __init__(self, stride=None, **arguments):
        super().__init__(self._ndim, stride=stride, **arguments)


class SparseMaxPool(_SparsePool):
    """max(0, window): inactive coordinates count as 0."""

    @one_node
    def forward(self, input):
        return max_pool_forward(self, input)


class SparseAvgPool(_SparsePool):
    """Mean over the active coordinates of the window."""

    @one_node
    def forward(self, input):
        return avg_pool_forward(self, input)


class SparseGlobalMaxOrAvgPool(SparseModule):
    """Dense [batch_size, C] from all rows of each batch item; items without rows give zeros."""

    def __init__(self, is_mean, name=None):
        super().__init__(name=name)
        self.is_mean = is_mean

    @one_node
    def forward(self, input):
        return global_pool_forward(self, input)


class SparseGlobalMaxPool(SparseGlobalMaxOrAvgPool):
    def __init__(self, name=None):
        super().__init__(is_mean=False, name=name)


class SparseGlobalAvgPool(SparseGlobalMaxOrAvgPool):
    def __init__(self, name=None):
        super().__init__(is_mean=True, name=name)


class SparseMaxPool1d(_OfDimension, SparseMaxPool):
    _ndim = 1


class SparseMaxPool2d(_OfDimension, SparseMaxPool):
    _ndim = 2


class SparseMaxPool3d(_OfDimension, SparseMaxPool):
    _ndim = 3


class SparseMaxPool4d(_OfDimension, SparseMaxPool):
    _ndim = 4


class SparseAvgPool1d(_OfDimension, SparseAvgPool):
    _ndim = 1


class SparseAvgPool2d(_OfDimension, SparseAvgPool):
    _ndim = 2


class SparseAvgPool3d(_OfDimension, SparseAvgPool):
    _ndim = 3


ALL_POOL_LAYERS = {
    SparseMaxPool,
    SparseMaxPool1d,
    SparseMaxPool2d,
    SparseMaxPool3d,
    SparseMaxPool4d,
    SparseAvgPool,
    SparseAvgPool1d,
    SparseAvgPool2d,
    SparseAvgPool3d,
}
