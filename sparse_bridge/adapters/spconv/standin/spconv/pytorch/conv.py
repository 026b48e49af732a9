"""Convolution layers: parameters and geometry; shared adapter functions do the work."""

import functools
import math

import numpy as np
import torch
from cumm import tensorview as tv
from spconv import SPCONV_VERSION_NUMBERS as SPCONV_VERSION_NUMBERS
from spconv import constants
from spconv import pytorch as spconv  # noqa: F401 - the name is upstream's
from spconv.constants import ALL_WEIGHT_IS_KRSC as ALL_WEIGHT_IS_KRSC
from spconv.constants import SAVED_WEIGHT_LAYOUT as SAVED_WEIGHT_LAYOUT
from spconv.constants import SPCONV_DEBUG_WEIGHT as SPCONV_DEBUG_WEIGHT
from spconv.core import ConvAlgo
from spconv.cppconstants import CPU_ONLY_BUILD as CPU_ONLY_BUILD
from spconv.debug_utils import spconv_save_debug_data as spconv_save_debug_data
from spconv.pytorch import functional as Fsp  # noqa: F401 - the name is upstream's
from spconv.pytorch import modules, ops  # noqa: F401 - the name is upstream's
from spconv.pytorch.core import ImplicitGemmIndiceData as ImplicitGemmIndiceData
from spconv.pytorch.core import IndiceData as IndiceData
from spconv.pytorch.core import SparseConvTensor, expand_nd
from spconv.pytorch.modules import SparseModule
from spconv.tools import nullcontext as nullcontext
from torch import nn
from torch.fx import Proxy
from torch.nn import init

from sparse_bridge import settings
from sparse_bridge.adapters.channels import check_channels
from sparse_bridge.adapters.spconv import keys, weights
from sparse_bridge.adapters.spconv.conv import conv_forward, expected_of, layer_forward
from sparse_bridge.adapters.spconv.geometry import KernelSizeError
from sparse_bridge.adapters.spconv.rules.switches import check_layout
from sparse_bridge.adapters.spconv.tracing import as_node
from sparse_bridge.adapters.spconv.upstream.constructors import REQUIRED, takes
from sparse_bridge.adapters.steps import Steps
from sparse_bridge.adapters.warmup_registry import expect
from sparse_bridge.errors import ContractError

FILTER_HWIO = constants.FILTER_HWIO
_MAX_NUM_VOXELS_DURING_TRAINING = "max_num_voxels_during_training"


class SparseConvolutionBase:
    """Geometry and forward logic, without parameters."""

    def __init__(
        self,
        ndim,
        in_channels,
        out_channels,
        kernel_size=3,
        stride=1,
        padding=0,
        dilation=1,
        groups=1,
        bias=True,
        subm=False,
        output_padding=0,
        transposed=False,
        inverse=False,
        indice_key=None,
        algo=None,
        fp32_accum=None,
        record_voxel_count=False,
        act_type=tv.gemm.Activation.None_,
        act_alpha=0,
        act_beta=0,
        large_kernel_fast_algo=False,
    ):
        check_layout(constants)
        _check_groups(groups, in_channels, out_channels)
        self.ndim = ndim
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = expand_nd(ndim, kernel_size, "kernel_size")
        self.stride = expand_nd(ndim, stride, "stride")
        self.dilation = expand_nd(ndim, dilation, "dilation")
        self.padding = expand_nd(ndim, padding, "padding")
        self.output_padding = expand_nd(ndim, output_padding, "output_padding")
        _check_sizes(self)
        kv = math.prod(self.kernel_size)
        # With one offset and no stride the layer is one matrix product, unless it is grouped.
        self.conv1x1 = kv == 1 and groups == 1 and (subm or math.prod(self.stride) == 1)
        if self.conv1x1 and not subm and any(self.padding):
            raise ContractError(f"a convolution of kernel size 1 takes no padding, got {self.padding}.")
        self.transposed = transposed
        self.inverse = inverse
        self.groups = groups
        self.subm = subm
        self.indice_key = keys.checked_key(indice_key)
        self.record_voxel_count = record_voxel_count
        if algo is None:
            limit = 128 if large_kernel_fast_algo else 32
            algo = ConvAlgo.MaskImplicitGemm if kv <= limit else ConvAlgo.Native
        if algo == ConvAlgo.MaskSplitImplicitGemm and kv > 32:
            raise ContractError(f"MaskSplitImplicitGemm takes kernels of at most 32 offsets, got {kv}; leave algo out.")
        self.algo = keys.checked_algo(algo, ConvAlgo)
        self.fp32_accum = fp32_accum
        self.weight_shape = [out_channels, *self.kernel_size, in_channels // groups]
        self.act_type = act_type
        self.act_alpha = act_alpha
        self.act_beta = act_beta
        if self.conv1x1 and act_type != tv.gemm.Activation.None_:
            raise ContractError("a convolution of kernel size 1 takes no fused activation.")
        self.scale = 1.0
        self.zero_point = 0

    def is_inverseable(self):
        return self.indice_key is not None and not self.subm

    _check_subm_reuse_valid, _check_inverse_reuse_valid = keys.OUR_CHECKS

    _conv_forward = conv_forward


def _check_sizes(layer):
    check_channels({"in_channels": layer.in_channels, "out_channels": layer.out_channels}, KernelSizeError)
    if min(layer.kernel_size) < 1:
        raise KernelSizeError(f"kernel size {layer.kernel_size}; every axis needs at least 1.")


def _check_groups(groups, in_channels, out_channels):
    if groups == 1:
        return
    if not settings.get().groups:
        raise ContractError(
            f"groups is {groups}; spconv takes only 1. Set SPARSE_BRIDGE_RULES=groups to allow "
            "grouped convolutions, which spconv itself cannot run."
        )
    if groups < 1 or in_channels % groups or out_channels % groups:
        raise ContractError(f"{groups} groups do not divide {in_channels} input and {out_channels} output channels.")


# spconv 1.x chose with `use_hash=` how it built maps; it changes nothing here.
_takes = functools.partial(takes, ignored="use_hash")


class SparseConvolution(SparseConvolutionBase, SparseModule):
    """A convolution with parameters `weight` [C_out, *kernel, C_in] and `bias` [C_out] or None."""

    @_takes(SparseConvolutionBase.__init__, name=None, device=None, dtype=None)
    def __init__(self, bias=True, name=None, device=None, dtype=None, **geometry):
        SparseModule.__init__(self, name=name)
        SparseConvolutionBase.__init__(self, **geometry)
        if self.record_voxel_count and not self.subm and not self.inverse:
            self.register_buffer(_MAX_NUM_VOXELS_DURING_TRAINING, torch.zeros(1, dtype=torch.int32, device=device))
        self.weight = nn.Parameter(torch.zeros(*self.weight_shape, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.zeros(self.out_channels, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()
        self._register_load_state_dict_pre_hook(self._load_weight_different_layout)
        expect(self, expected_of)

    def get_max_num_voxels(self):
        return getattr(self, _MAX_NUM_VOXELS_DURING_TRAINING, None)

    def _load_weight_different_layout(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        weights.before_loading(self, state_dict, prefix, error_msgs)

    def extra_repr(self):
        text = (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, padding={self.padding}, dilation={self.dilation}, "
            f"output_padding={self.output_padding}"
        )
        if self.groups != 1:
            text += f", groups={self.groups}"
        if self.bias is None:
            text += ", bias=False"
        text += f", algo={self.algo}"
        if self.act_type != tv.gemm.Activation.None_:
            text += f", act={self.act_type}"
        return text

    def _fan_in(self):
        return self.in_channels // self.groups * int(np.prod(self.kernel_size))

    def reset_parameters(self):
        """Kaiming-uniform as torch's own convolutions have it: bound 1 / sqrt(C_in * V)."""
        slope = math.sqrt(0.005) if constants.SPCONV_DEBUG_WEIGHT else math.sqrt(5)
        fan_in = self._fan_in()
        bound = math.sqrt(3.0) * init.calculate_gain("leaky_relu", slope) / math.sqrt(fan_in)
        with torch.no_grad():
            self.weight.uniform_(-bound, bound)
            if self.bias is not None:
                init.uniform_(self.bias, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))

    def forward(self, input: SparseConvTensor, add_input: SparseConvTensor = None):
        if isinstance(input, Proxy):
            more = () if add_input is None else (add_input,)
            return as_node(self, input, input, *more)
        parameters, kind = self._parameters, type(self)  # as `hooks.parameters_of`, without a call
        if "weight" not in parameters or "bias" not in parameters or hasattr(kind, "weight") or hasattr(kind, "bias"):
            weight, bias = self.weight, self.bias
        else:
            weight, bias = parameters["weight"], parameters["bias"]
        check = self._check_inverse_reuse_valid if self.inverse else self._check_subm_reuse_valid
        forward = getattr(self._conv_forward, "__func__", None)
        if forward is conv_forward and getattr(check, "__func__", None) in keys.OUR_CHECKS:
            return layer_forward(self, input, weight, bias, add_input)
        return self._conv_forward(
            self.training,
            input,
            weight,
            bias,
            add_input,
            name=self.name,
            sparse_unique_name=self._sparse_unique_name,
            act_type=self.act_type,
            act_alpha=self.act_alpha,
            act_beta=self.act_beta,
        )


_SHARED = "in_channels out_channels kernel_size stride padding dilation groups bias indice_key algo fp32_accum"
_LAST = "large_kernel_fast_algo name"


class _Regular(SparseConvolution):
    """Outputs wherever the kernel meets an active coordinate."""

    _ndim: int
    _transposed = False

    @_takes(SparseConvolution.__init__, f"{_SHARED} record_voxel_count {_LAST}", kernel_size=REQUIRED)
    def __init__(self, **arguments):
        super().__init__(self._ndim, transposed=self._transposed, **arguments)


class _Transposed(_Regular):
    """Every active coordinate spreads over its kernel, onto new ones."""

    _transposed = True


class _Submanifold(SparseConvolution):
    """Outputs = inputs; stride and padding are accepted and ignored."""

    _ndim: int

    @_takes(SparseConvolution.__init__, f"{_SHARED} {_LAST}", kernel_size=REQUIRED)
    def __init__(self, **arguments):
        super().__init__(self._ndim, subm=True, **arguments)


class _Inverse(SparseConvolution):
    """The pairs of `indice_key`'s layer read backwards: outputs are that layer's inputs."""

    _ndim: int

    @_takes(
        SparseConvolution.__init__,
        f"in_channels out_channels kernel_size indice_key bias algo fp32_accum {_LAST}",
        kernel_size=REQUIRED,
        indice_key=REQUIRED,
    )
    def __init__(self, **arguments):
        super().__init__(self._ndim, inverse=True, **arguments)


class SparseConv1d(_Regular):
    _ndim = 1


class SparseConv2d(_Regular):
    _ndim = 2


class SparseConv3d(_Regular):
    _ndim = 3


class SparseConv4d(_Regular):
    _ndim = 4


class SparseConvTranspose1d(_Transposed):
    _ndim = 1


class SparseConvTranspose2d(_Transposed):
    _ndim = 2


class SparseConvTranspose3d(_Transposed):
    _ndim = 3


class SparseConvTranspose4d(_Transposed):
    _ndim = 4


class SparseInverseConv1d(_Inverse):
    _ndim = 1


class SparseInverseConv2d(_Inverse):
    _ndim = 2


class SparseInverseConv3d(_Inverse):
    _ndim = 3


class SparseInverseConv4d(_Inverse):
    _ndim = 4


class SubMConv1d(_Submanifold):
    _ndim = 1


class SubMConv2d(_Submanifold):
    _ndim = 2


class SubMConv3d(_Submanifold):
    _ndim = 3


class SubMConv4d(_Submanifold):
    _ndim = 4


DEFAULT_SPARSE_CONV_TYPES = {
    SparseConv1d,
    SparseConv2d,
    SparseConv3d,
    SparseConv4d,
    SubMConv1d,
    SubMConv2d,
    SubMConv3d,
    SubMConv4d,
    SparseInverseConv1d,
    SparseInverseConv2d,
    SparseInverseConv3d,
    SparseInverseConv4d,
    SparseConvTranspose1d,
    SparseConvTranspose2d,
    SparseConvTranspose3d,
    SparseConvTranspose4d,
}

modules._convolution = SparseConvolution, Steps(SparseConvolution, "forward", also=("forward",))
