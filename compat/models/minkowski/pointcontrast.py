"""PointContrast's Res16UNet34C in the words of MinkowskiEngine 0.4, with squeeze-and-excitation
as an option (its sibling project SpatioTemporalSegmentation has both).

Source: layer stack S27 and the table of repositories of the usage notes.
"""

from __future__ import annotations

import MinkowskiEngine as ME
import torch
from torch import nn

from .res16unet import BasicBlock, Layers, Res16UNet34C

int_to_region_type = {m.value: m for m in ME.RegionType}


class Layers04(Layers):
    """Keyword names, regions and ignored dimensions of 0.4."""

    @staticmethod
    def region(conv_type):
        regions = {0: ME.RegionType.HYPERCUBE, 1: ME.RegionType.HYPERCROSS}
        return int_to_region_type[regions[conv_type.value].value]

    @classmethod
    def _make(cls, kind, inp, out, kernel_size, stride, dilation, bias, conv_type, D):
        made = super()._make(kind, inp, out, kernel_size, stride, dilation, False, conv_type, D)
        if not bias:
            return made
        return kind(
            in_channels=inp,
            out_channels=out,
            kernel_size=kernel_size,
            stride=stride,
            dilation=dilation,
            has_bias=True,
            kernel_generator=made.kernel_generator,
            dimension=D,
        )

    @staticmethod
    def norm(width, D, bn_momentum):
        return ME.MinkowskiBatchNorm(width, momentum=bn_momentum, dimension=D)


class SELayer(nn.Module):
    def __init__(self, channel, reduction=16, D=-1):
        super().__init__()
        self.fc = nn.Sequential(
            ME.MinkowskiLinear(channel, channel // reduction),
            ME.MinkowskiReLU(inplace=True),
            ME.MinkowskiLinear(channel // reduction, channel),
            ME.MinkowskiSigmoid(),
        )
        self.pooling = ME.MinkowskiGlobalPooling(dimension=D)
        self.broadcast_mul = ME.MinkowskiBroadcastMultiplication(dimension=D)

    def forward(self, x):
        return self.broadcast_mul(x, self.fc(self.pooling(x)))


class BasicBlock04(BasicBlock):
    LAYERS = Layers04


class SEBasicBlock04(BasicBlock04):
    def __init__(self, inplanes, planes, D=3, **options):
        super().__init__(inplanes, planes, D=D, **options)
        self.se = SELayer(planes, D=D)

    def branch(self, x):
        return self.se(super().branch(x))


class PointContrastNet(Res16UNet34C):
    MAKE = Layers04
    BLOCK = BasicBlock04

    def __init__(self, in_channels=3, out_channels=32, normalize_feature=True, **options):
        super().__init__(in_channels, out_channels, **options)
        self.normalize_feature = normalize_feature

    def forward(self, x):
        out, _ = super().forward(x)
        if not self.normalize_feature:
            return out
        return ME.SparseTensor(
            out.F / (torch.norm(out.F, p=2, dim=1, keepdim=True) + 1e-8),
            coords_key=out.coords_key,
            coords_manager=out.coords_man,
        )


class SEPointContrastNet(PointContrastNet):
    BLOCK = SEBasicBlock04


def build(squeeze=False, **options):
    return (SEPointContrastNet if squeeze else PointContrastNet)(**options)


def batch(scene, device, dtype):
    """Made on the CPU, then moved: 0.4's order of things."""
    return (ME.SparseTensor(scene.features.to(dtype), coords=scene.coords).to(device),)
