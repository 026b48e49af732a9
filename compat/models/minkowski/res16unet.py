"""Res16UNet34C, the backbone of Mask3D and of MinkowskiEngine's earlier segmentation projects.

Source: layer stack S27 of the usage notes. Kernels come from `KernelGenerator`; a namespace of
layer makers lets projects of MinkowskiEngine 0.4 and 0.5 share the network.
"""

from __future__ import annotations

from enum import Enum

import MinkowskiEngine as ME
from torch import nn


class ConvType(Enum):
    SPATIAL_HYPERCUBE = 0
    SPATIAL_HYPERCROSS = 1


class Layers:
    """How MinkowskiEngine 0.5 makes the layers of the network."""

    @staticmethod
    def region(conv_type):
        return ME.RegionType(conv_type.value)

    @classmethod
    def conv(cls, inp, out, kernel_size, stride=1, dilation=1, bias=False, conv_type=None, D=-1):
        return cls._make(ME.MinkowskiConvolution, inp, out, kernel_size, stride, dilation, bias, conv_type, D)

    @classmethod
    def conv_tr(cls, inp, out, kernel_size, stride=1, dilation=1, bias=False, conv_type=None, D=-1):
        kind = ME.MinkowskiConvolutionTranspose
        return cls._make(kind, inp, out, kernel_size, stride, dilation, bias, conv_type, D)

    @classmethod
    def _make(cls, kind, inp, out, kernel_size, stride, dilation, bias, conv_type, D):
        kernel_generator = ME.KernelGenerator(
            kernel_size,
            stride,
            dilation,
            region_type=cls.region(conv_type or ConvType.SPATIAL_HYPERCUBE),
            axis_types=None,
            dimension=D,
        )
        return kind(
            in_channels=inp,
            out_channels=out,
            kernel_size=kernel_size,
            stride=stride,
            dilation=dilation,
            bias=bias,
            kernel_generator=kernel_generator,
            dimension=D,
        )

    @staticmethod
    def norm(width, D, bn_momentum):
        return ME.MinkowskiBatchNorm(width, momentum=bn_momentum)


class BasicBlock(nn.Module):
    EXPANSION = 1
    LAYERS = Layers

    def __init__(self, inplanes, planes, stride=1, dilation=1, downsample=None, bn_momentum=0.02, D=3):
        super().__init__()
        make = self.LAYERS
        self.conv1 = make.conv(inplanes, planes, 3, stride, dilation, D=D)
        self.norm1 = make.norm(planes, D, bn_momentum)
        self.conv2 = make.conv(planes, planes, 3, 1, dilation, D=D)
        self.norm2 = make.norm(planes, D, bn_momentum)
        self.relu = ME.MinkowskiReLU(inplace=True)
        self.downsample = downsample

    def branch(self, x):
        out = self.relu(self.norm1(self.conv1(x)))
        return self.norm2(self.conv2(out))

    def forward(self, x):
        out = self.branch(x)
        residual = x if self.downsample is None else self.downsample(x)
        out += residual
        return self.relu(out)


class Res16UNetBase(ME.MinkowskiNetwork):
    MAKE = Layers
    BLOCK = BasicBlock
    PLANES: tuple[int, ...] = (32, 64, 128, 256, 256, 256, 256, 256)
    LAYERS: tuple[int, ...] = (2, 2, 2, 2, 2, 2, 2, 2)
    INIT_DIM = 32
    NORM_TYPE = "BN"

    def __init__(self, in_channels, out_channels, conv1_kernel_size=5, bn_momentum=0.02, D=3):
        super().__init__(D)
        self.inplanes, self.bn_momentum = self.INIT_DIM, bn_momentum
        make, planes, layers = self.MAKE, self.PLANES, self.LAYERS
        self.conv0p1s1 = make.conv(in_channels, self.inplanes, conv1_kernel_size, D=D)
        self.bn0 = make.norm(self.inplanes, D, bn_momentum)
        skips = [self.inplanes]
        for level, stride in enumerate((1, 2, 4, 8)):
            down = make.conv(self.inplanes, self.inplanes, 2, 2, D=D)
            setattr(self, f"conv{level + 1}p{stride}s2", down)
            setattr(self, f"bn{level + 1}", make.norm(self.inplanes, D, bn_momentum))
            setattr(self, f"block{level + 1}", self._make_layer(planes[level], layers[level]))
            skips.append(self.inplanes)
        for level, stride in zip((4, 5, 6, 7), (16, 8, 4, 2), strict=True):
            up = make.conv_tr(self.inplanes, planes[level], 2, 2, D=D)
            setattr(self, f"convtr{level}p{stride}s2", up)
            setattr(self, f"bntr{level}", make.norm(planes[level], D, bn_momentum))
            self.inplanes = planes[level] + skips[7 - level]
            setattr(self, f"block{level + 1}", self._make_layer(planes[level], layers[level]))
        self.final = make.conv(self.inplanes, out_channels, 1, bias=True, D=D)
        self.relu = ME.MinkowskiReLU(inplace=True)
        for module in self.modules():
            if isinstance(module, ME.MinkowskiBatchNorm):
                nn.init.constant_(module.bn.weight, 1)
                nn.init.constant_(module.bn.bias, 0)

    def _make_layer(self, planes, blocks):
        downsample = None
        width = planes * self.BLOCK.EXPANSION
        if self.inplanes != width:
            downsample = nn.Sequential(
                self.MAKE.conv(self.inplanes, width, 1, D=self.D), self.MAKE.norm(width, self.D, self.bn_momentum)
            )
        momentum = self.bn_momentum
        first = self.BLOCK(self.inplanes, planes, downsample=downsample, bn_momentum=momentum, D=self.D)
        self.inplanes = width
        rest = [self.BLOCK(width, planes, bn_momentum=momentum, D=self.D) for _ in range(1, blocks)]
        return nn.Sequential(first, *rest)

    def forward(self, x):
        """(class scores, feature maps at tensor strides 16, 8, 4, 2, 1)"""
        out = self.relu(self.bn0(self.conv0p1s1(x)))
        skips = [out]
        for level, stride in zip((1, 2, 3, 4), (1, 2, 4, 8), strict=True):
            out = getattr(self, f"conv{level}p{stride}s2")(out)
            out = self.relu(getattr(self, f"bn{level}")(out))
            out = getattr(self, f"block{level}")(out)
            skips.append(out)
        feature_maps = [skips.pop()]
        for level, stride in zip((4, 5, 6, 7), (16, 8, 4, 2), strict=True):
            out = getattr(self, f"convtr{level}p{stride}s2")(out)
            out = self.relu(getattr(self, f"bntr{level}")(out))
            out = getattr(self, f"block{level + 1}")(ME.cat(out, skips.pop()))
            feature_maps.append(out)
        return self.final(out), feature_maps


class Res16UNet34C(Res16UNetBase):
    LAYERS = (2, 3, 4, 6, 2, 2, 2, 2)
    PLANES = (32, 64, 128, 256, 256, 128, 96, 96)
