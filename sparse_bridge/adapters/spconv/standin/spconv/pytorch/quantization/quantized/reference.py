"""Convolutions that hold float weights together with their scales, and compute with the values that
int8 would hold."""

from cumm import tensorview as tv
from spconv.core import ConvAlgo as ConvAlgo
from spconv.pytorch.conv import SparseConvolution
from spconv.pytorch.core import SparseConvTensor as SparseConvTensor
from spconv.pytorch.quantization.utils import constructor_arguments
from torch import nn
from torch.ao.nn.quantized.reference.modules.utils import ReferenceQuantizedModule

from sparse_bridge.adapters.spconv.conv import layer_forward


class SpConv(SparseConvolution, ReferenceQuantizedModule):
    """weight_qparams: qscheme, dtype, scale, zero_point and axis of the weight."""

    _IS_REFERENCE = True

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
        name=None,
        device=None,
        dtype=None,
        weight_qparams=None,
    ):
        super().__init__(
            ndim,
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            subm,
            output_padding,
            transposed,
            inverse,
            indice_key,
            algo,
            fp32_accum,
            record_voxel_count,
            act_type,
            act_alpha,
            act_beta,
            name=name,
            device=device,
            dtype=dtype,
        )
        self._init_weight_qparams(weight_qparams, device)

    def forward(self, x, add_input=None):
        return layer_forward(self, x, self.get_weight(), self.bias, add_input)

    def weight_qparams(self):
        """Keywords of the weight's scales, as the constructor takes them."""
        names = "qscheme", "dtype", "scale", "zero_point", "axis"
        return {name: getattr(self, f"weight_{name}") for name in names}

    def _get_name(self):
        return "QuantizedSparseConv(Reference)"

    @classmethod
    def from_float(cls, float_conv, weight_qparams):
        reference = cls(
            **constructor_arguments(float_conv),
            device=float_conv.weight.device,
            dtype=float_conv.weight.dtype,
            weight_qparams=weight_qparams,
        )
        reference.weight = nn.Parameter(float_conv.weight.detach())
        if float_conv.bias is not None:
            reference.bias = nn.Parameter(float_conv.bias.detach())
        return reference.train(float_conv.training)
