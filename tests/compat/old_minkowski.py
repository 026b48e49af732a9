"""Networks of two projects in the words of MinkowskiEngine 0.4, as they were first released.

SpatioTemporalSegmentation: kernels by convolution type, Res16UNet34C and ResUNet18INBN. FCGF: pairs
of clouds voxelised by index, ResUNetBN2C. Written from their layer stacks; widths and depths are
options.
"""

from __future__ import annotations

from enum import Enum

import MinkowskiEngine as ME
import MinkowskiEngine.MinkowskiFunctional as MEF
import numpy as np
import torch
from torch import nn


class ConvType(Enum):
    HYPERCUBE = 0
    SPATIAL_HYPERCUBE = 1
    SPATIAL_HYPERCUBE_TEMPORAL_HYPERCROSS = 6


REGIONS = {
    ConvType.HYPERCUBE: ME.RegionType.HYPERCUBE,
    ConvType.SPATIAL_HYPERCUBE: ME.RegionType.HYPERCUBE,
    ConvType.SPATIAL_HYPERCUBE_TEMPORAL_HYPERCROSS: ME.RegionType.HYBRID,
}
REGIONS_BY_NUMBER = {m.value: m for m in ME.RegionType}
BLOCKS = ConvType.SPATIAL_HYPERCUBE_TEMPORAL_HYPERCROSS
PLAIN = ConvType.SPATIAL_HYPERCUBE


def over_time(n, m, D):
    return n if D == 3 else [n, n, n, m]


def kernel_of(conv_type, kernel_size, D):
    """(region type, axis types, kernel size) of a convolution type."""
    region, axis_types = REGIONS_BY_NUMBER[REGIONS[conv_type].value], None
    if conv_type is ConvType.SPATIAL_HYPERCUBE:
        size = list(kernel_size[:3]) if isinstance(kernel_size, list) else [kernel_size] * 3
        kernel_size = [*size, 1] if D == 4 else size
    elif conv_type is BLOCKS:
        axis_types = [ME.RegionType.HYPERCUBE] * 3
        if D == 4:
            axis_types.append(ME.RegionType.HYPERCROSS)
    return region, axis_types, kernel_size


def conv(in_planes, out_planes, kernel_size, stride=1, dilation=1, bias=False, conv_type=PLAIN, D=-1, layer=None):
    region, axis_types, kernel_size = kernel_of(conv_type, kernel_size, D)
    kernel_generator = ME.KernelGenerator(
        kernel_size, stride, dilation, region_type=region, axis_types=axis_types, dimension=D
    )
    return (layer or ME.MinkowskiConvolution)(
        in_channels=in_planes,
        out_channels=out_planes,
        kernel_size=kernel_size,
        stride=stride,
        dilation=dilation,
        has_bias=bias,
        kernel_generator=kernel_generator,
        dimension=D,
    )


def conv_tr(in_planes, out_planes, kernel_size, upsample_stride=1, D=-1):
    layer = ME.MinkowskiConvolutionTranspose
    return conv(in_planes, out_planes, kernel_size, upsample_stride, D=D, layer=layer)


def norm(n_channels, D, bn_momentum=0.1, instance=False):
    batch = ME.MinkowskiBatchNorm(n_channels, momentum=bn_momentum)
    if not instance:
        return batch
    return nn.Sequential(ME.MinkowskiInstanceNorm(n_channels, dimension=D), batch)


class Block(nn.Module):
    INSTANCE = False
    CONV_TYPE = BLOCKS

    def __init__(self, inplanes, planes, dilation=1, downsample=None, bn_momentum=0.1, D=3):
        super().__init__()
        kind = {"dilation": dilation, "conv_type": self.CONV_TYPE, "D": D}
        self.conv1 = conv(inplanes, planes, over_time(3, 3, D), **kind)
        self.norm1 = norm(planes, D, bn_momentum, self.INSTANCE)
        self.conv2 = conv(planes, planes, over_time(3, 3, D), **kind)
        self.norm2 = norm(planes, D, bn_momentum, self.INSTANCE)
        self.relu = ME.MinkowskiReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x):
        residual = x
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        if self.downsample is not None:
            residual = self.downsample(x)
        out += residual
        return self.relu(out)


class BlockINBN(Block):
    INSTANCE = True


class CubeBlock(Block):
    """The same kernels as plain cubes: another order of offsets."""

    CONV_TYPE = ConvType.HYPERCUBE


class Res16UNet(ME.MinkowskiNetwork):
    """Four levels down and up. `levels` below four make ResUNet's three."""

    BLOCK = Block
    STEM = 5

    def __init__(self, in_channels, out_channels, planes, layers, bn_momentum=0.02, D=3):
        super().__init__(D)
        self.levels = len(planes) // 2
        self.inplanes, self.momentum, two = planes[0] if self.levels == 3 else 32, bn_momentum, (over_time(2, 1, D))
        self.conv0 = conv(in_channels, self.inplanes, over_time(self.STEM, 1, D), D=D)
        self.bn0 = norm(self.inplanes, D, bn_momentum)
        skips = [self.inplanes]
        for level in range(self.levels):
            setattr(self, f"down{level}", conv(self.inplanes, self.inplanes, two, two, D=D))
            setattr(self, f"bn_down{level}", norm(self.inplanes, D, bn_momentum))
            setattr(self, f"enc{level}", self._make_layer(planes[level], layers[level]))
            skips.append(self.inplanes)
        for step in range(self.levels):
            width, depth = planes[self.levels + step], layers[self.levels + step]
            setattr(self, f"up{step}", conv_tr(self.inplanes, width, two, two, D=D))
            setattr(self, f"bn_up{step}", norm(width, D, bn_momentum))
            self.inplanes = width + skips[self.levels - 1 - step]
            setattr(self, f"dec{step}", self._make_layer(width, depth))
        self.final = conv(self.inplanes, out_channels, 1, bias=True, D=D)
        self.relu = ME.MinkowskiReLU(inplace=True)
        for module in self.modules():
            if isinstance(module, ME.MinkowskiBatchNorm):
                nn.init.constant_(module.bn.weight, 1)

    def _make_layer(self, planes, blocks):
        downsample = None
        if self.inplanes != planes:
            downsample = nn.Sequential(conv(self.inplanes, planes, 1, D=self.D), norm(planes, self.D, self.momentum))
        made = [self.BLOCK(self.inplanes, planes, 1, downsample, self.momentum, self.D)]
        made += [self.BLOCK(planes, planes, D=self.D) for _ in range(blocks - 1)]
        self.inplanes = planes
        return nn.Sequential(*made)

    def forward(self, x):
        out = self.relu(self.bn0(self.conv0(x)))
        skips = [out]
        for level in range(self.levels):
            out = getattr(self, f"down{level}")(out)
            out = self.relu(getattr(self, f"bn_down{level}")(out))
            out = getattr(self, f"enc{level}")(out)
            skips.append(out)
        for step in range(self.levels):
            out = getattr(self, f"up{step}")(out)
            out = self.relu(getattr(self, f"bn_up{step}")(out))
            out = ME.cat((out, skips[self.levels - 1 - step]))
            out = getattr(self, f"dec{step}")(out)
        return self.final(out)


class CubeRes16UNet(Res16UNet):
    BLOCK = CubeBlock


class ResUNetINBN(Res16UNet):
    BLOCK = BlockINBN


RES16UNET34C = {"planes": (32, 64, 128, 256, 256, 128, 96, 96), "layers": (2, 3, 4, 6, 2, 2, 2, 2)}
RESUNET18 = {"planes": (64, 128, 256, 256, 128, 128), "layers": (2, 2, 2, 2, 2, 2)}


class FCGFBlock(nn.Module):
    def __init__(self, channels, bn_momentum, D):
        super().__init__()
        self.conv1 = ME.MinkowskiConvolution(channels, channels, kernel_size=3, stride=1, dimension=D)
        self.norm1 = ME.MinkowskiBatchNorm(channels, momentum=bn_momentum)
        self.conv2 = ME.MinkowskiConvolution(
            channels, channels, kernel_size=3, stride=1, dilation=1, has_bias=False, dimension=D
        )
        self.norm2 = ME.MinkowskiBatchNorm(channels, momentum=bn_momentum)

    def forward(self, x):
        out = MEF.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += x
        return MEF.relu(out)


class ResUNetBN2C(ME.MinkowskiNetwork):
    CHANNELS = (32, 64, 128, 256)
    TR_CHANNELS = (64, 64, 64, 128)

    def __init__(self, in_channels=1, out_channels=32, conv1_kernel_size=7, momentum=0.1, D=3):
        super().__init__(D)
        down, up, before = self.CHANNELS, self.TR_CHANNELS, in_channels
        for level, width in enumerate(down):
            made = ME.MinkowskiConvolution(
                in_channels=before,
                out_channels=width,
                kernel_size=conv1_kernel_size if level == 0 else 3,
                stride=1 + (level > 0),
                dilation=1,
                has_bias=False,
                dimension=D,
            )
            setattr(self, f"conv{level + 1}", made)
            setattr(self, f"norm{level + 1}", ME.MinkowskiBatchNorm(width, momentum=momentum))
            setattr(self, f"block{level + 1}", FCGFBlock(width, momentum, D))
            before = width
        for level in (3, 2, 1):
            made = ME.MinkowskiConvolutionTranspose(
                in_channels=before,
                out_channels=up[level],
                kernel_size=3,
                stride=2,
                dilation=1,
                has_bias=False,
                dimension=D,
            )
            setattr(self, f"conv{level + 1}_tr", made)
            tr_norm = ME.MinkowskiBatchNorm(up[level], momentum=momentum)
            setattr(self, f"norm{level + 1}_tr", tr_norm)
            setattr(self, f"block{level + 1}_tr", FCGFBlock(up[level], momentum, D))
            before = up[level] + down[level - 1]
        self.conv1_tr = ME.MinkowskiConvolution(
            in_channels=before, out_channels=up[0], kernel_size=1, stride=1, dilation=1, has_bias=False, dimension=D
        )
        self.final = ME.MinkowskiConvolution(
            in_channels=up[0],
            out_channels=out_channels,
            kernel_size=1,
            stride=1,
            dilation=1,
            has_bias=True,
            dimension=D,
        )

    def forward(self, x):
        out, skips = x, []
        for level in (1, 2, 3, 4):
            out = getattr(self, f"norm{level}")(getattr(self, f"conv{level}")(out))
            skips.append(getattr(self, f"block{level}")(out))
            out = MEF.relu(skips[-1])
        for level in (4, 3, 2):
            out = getattr(self, f"norm{level}_tr")(getattr(self, f"conv{level}_tr")(out))
            out = MEF.relu(getattr(self, f"block{level}_tr")(out))
            out = ME.cat((out, skips[level - 2]))
        out = self.final(MEF.relu(self.conv1_tr(out)))
        return ME.SparseTensor(
            out.F / torch.norm(out.F, p=2, dim=1, keepdim=True),
            coords_key=out.coords_key,
            coords_manager=out.coords_man,
        )


def pair_batch(clouds, voxel_size):
    """Clouds [N, 3] voxelised by the index of their first points: (coordinates, ones, indices)."""
    picked = [ME.utils.sparse_quantize(xyz / voxel_size, return_index=True) for xyz in clouds]
    coords = [np.floor(xyz[index] / voxel_size) for xyz, index in zip(clouds, picked, strict=True)]
    feats = [np.ones((len(index), 1)) for index in picked]
    coords, feats = ME.utils.sparse_collate(coords, feats)
    return coords, feats.float(), picked
