"""mmdetection3d's MinkUNet with the MinkowskiEngine backend: layers out of a registry.

Source: layer stack S10 of the usage notes.
"""

from __future__ import annotations

import MinkowskiEngine as ME
from MinkowskiEngine.modules.resnet_block import BasicBlock
from torch import nn

MODELS: dict[str, type[nn.Module]] = {}


def register_module(module, name):
    """A registry refuses a second class under one name."""
    if name in MODELS:
        raise KeyError(f"{name} is already registered")
    if not isinstance(module, type):
        raise TypeError(f"{name} must be a class, but got {type(module)}")
    MODELS[name] = module


register_module(ME.MinkowskiConvolution, "MinkowskiConvNd")
register_module(ME.MinkowskiConvolutionTranspose, "MinkowskiConvNdTranspose")
register_module(ME.MinkowskiBatchNorm, "MinkowskiBN")
register_module(ME.MinkowskiReLU, "MinkowskiReLU")


class MinkowskiConvModule(nn.Sequential):
    """Convolution, norm, activation; the first six arguments are positional."""

    def __init__(
        self,
        in_channels,
        out_channels,
        kernel_size,
        stride=1,
        dilation=1,
        bias=False,
        conv_type="MinkowskiConvNd",
        act=True,
    ):
        layers = [
            MODELS[conv_type](in_channels, out_channels, kernel_size, stride, dilation, bias, dimension=3),
            MODELS["MinkowskiBN"](out_channels, eps=1e-5),
        ]
        if act:
            layers.append(MODELS["MinkowskiReLU"](inplace=True))
        super().__init__(*layers)


class MinkowskiBasicBlock(BasicBlock):
    """The library's block behind the project's signature."""

    def __init__(self, inplanes, planes, stride=1, dilation=1):
        downsample = None
        if inplanes != planes or stride != 1:
            downsample = MinkowskiConvModule(inplanes, planes, 1, stride, act=False)
        super().__init__(inplanes, planes, stride=stride, dilation=dilation, downsample=downsample, dimension=3)


class MinkUNetBackbone(nn.Module):
    def __init__(
        self,
        in_channels=4,
        base_channels=32,
        encoder_channels=(32, 64, 128, 256),
        encoder_blocks=(2, 2, 2, 2),
        decoder_channels=(256, 128, 96, 96),
        decoder_blocks=(2, 2, 2, 2),
    ):
        super().__init__()
        self.conv_input = nn.Sequential(
            MinkowskiConvModule(in_channels, base_channels, 3), MinkowskiConvModule(base_channels, base_channels, 3)
        )
        widths = [base_channels, *encoder_channels]
        self.encoder = nn.ModuleList(
            nn.Sequential(
                MinkowskiConvModule(before, before, 2, 2),
                *[MinkowskiBasicBlock(width if i else before, width) for i in range(count)],
            )
            for before, width, count in zip(widths, encoder_channels, encoder_blocks, strict=False)
        )
        self.decoder = nn.ModuleList()
        before = widths[-1]
        laterals = widths[-2::-1]
        for lateral, width, count in zip(laterals, decoder_channels, decoder_blocks, strict=True):
            up = MinkowskiConvModule(before, width, 2, 2, conv_type="MinkowskiConvNdTranspose")
            blocks = [MinkowskiBasicBlock(width if i else width + lateral, width) for i in range(count)]
            self.decoder.append(nn.ModuleList([up, nn.Sequential(*blocks)]))
            before = width

    def forward(self, voxel_features, coors):
        x = self.conv_input(ME.SparseTensor(voxel_features, coors))
        laterals = [x]
        for encoder_layer in self.encoder:
            x = encoder_layer(x)
            laterals.append(x)
        laterals = laterals[:-1][::-1]
        for decoder_layer, lateral in zip(self.decoder, laterals, strict=True):
            x = decoder_layer[0](x)
            x = ME.cat((x, lateral))
            x = decoder_layer[1](x)
        return x.F


class Segmentor(nn.Module):
    """A backbone and mmdetection3d's MinkUNetHead: one linear layer per voxel."""

    def __init__(self, in_channels=4, num_classes=19, **widths):
        super().__init__()
        self.backbone = MinkUNetBackbone(in_channels, **widths)
        self.decode_head = nn.Module()
        channels = widths.get("decoder_channels", (96,))[-1]
        self.decode_head.conv_seg = nn.Linear(channels, num_classes)

    def forward(self, voxel_features, coors):
        return self.decode_head.conv_seg(self.backbone(voxel_features, coors))


def build(**options):
    return Segmentor(**options)


def batch(scene, device, dtype):
    """(voxel features, coordinates [batch, x, y, z])."""
    return scene.features.to(device, dtype), scene.coords.to(device)
