"""Observers and fake quantisers that look at the features of sparse tensors, and the default
configurations: symmetric int8, per tensor for activations, per output channel for weights."""

import torch
from spconv.pytorch.core import SparseConvTensor
from spconv.pytorch.modules import PrintCurrentTime as PrintCurrentTime
from spconv.pytorch.modules import PrintTensorMeta as PrintTensorMeta
from torch.ao.quantization.fake_quantize import FakeQuantize, FusedMovingAvgObsFakeQuantize
from torch.ao.quantization.observer import (
    HistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
)
from torch.ao.quantization.qconfig import QConfig
from torch.ao.quantization.qconfig_mapping import _get_default_qconfig_mapping_with_default_qconfig


class _OnFeatures:
    """Acts on the features of a sparse tensor; one without rows is passed on."""

    def forward(self, input):
        if not isinstance(input, SparseConvTensor):
            return super().forward(input)
        if input.features.shape[0] == 0:
            return input
        return input.replace_feature(super().forward(input.features))


class SparseHistogramObserver(_OnFeatures, HistogramObserver):
    """Chooses the range by a histogram of what it has seen."""


class SparseMinMaxObserver(_OnFeatures, MinMaxObserver):
    """Chooses the range by the extremes it has seen."""


class SparseMovingAvgObsFakeQuantize(_OnFeatures, FakeQuantize):
    """Rounds to the range that its observer has found, and lets gradients through."""


class SparseFusedMovingAvgObsFakeQuantize(_OnFeatures, FusedMovingAvgObsFakeQuantize):
    """The same in one operation, for observers of moving averages."""


_ACTIVATION = {
    "quant_min": -128,
    "quant_max": 127,
    "dtype": torch.qint8,
    "reduce_range": False,
    "qscheme": torch.per_tensor_symmetric,
    "eps": 2**-12,
}
_WEIGHT = {"dtype": torch.qint8, "qscheme": torch.per_channel_symmetric}

default_symmetric_spconv_ptq_qconfig = QConfig(
    activation=SparseHistogramObserver.with_args(**_ACTIVATION), weight=PerChannelMinMaxObserver.with_args(**_WEIGHT)
)
default_symmetric_spconv_qat_qconfig = QConfig(
    activation=SparseFusedMovingAvgObsFakeQuantize.with_args(observer=MovingAverageMinMaxObserver, **_ACTIVATION),
    weight=FusedMovingAvgObsFakeQuantize.with_args(
        observer=MovingAveragePerChannelMinMaxObserver, quant_min=-128, quant_max=127, **_WEIGHT
    ),
)


def get_default_spconv_trt_ptq_qconfig(backend, version):
    """For calibration after training. backend, version: accepted, there is one of each."""
    return default_symmetric_spconv_ptq_qconfig


def get_default_spconv_trt_qat_qconfig(backend, version):
    """For training with fake quantisation. backend, version: accepted, there is one of each."""
    return default_symmetric_spconv_qat_qconfig


def get_default_spconv_qconfig_mapping(is_qat, backend="fbgemm", version=0):
    """Which layers are quantised and how: all of them by the default configuration."""
    choose = get_default_spconv_trt_qat_qconfig if is_qat else get_default_spconv_trt_ptq_qconfig
    return _get_default_qconfig_mapping_with_default_qconfig(is_qat, backend, choose(backend, version))
