"""MinkUNet as the examples of MinkowskiEngine define it: one base, variants by class attributes.

Source: layer stacks S14, S25 of the usage notes.
"""

from __future__ import annotations

import MinkowskiEngine as ME
import torch
from MinkowskiEngine.modules.resnet_block import BasicBlock, Bottleneck
from torch import nn


class ResNetBase(nn.Module):
    """Stages of residual blocks and their initialisation."""

    BLOCK = BasicBlock
    LAYERS: tuple[int, ...] = ()
    PLANES: tuple[int, ...] = ()
    INIT_DIM = 32

    def __init__(self, in_channels, out_channels, D=3):
        super().__init__()
        self.D = D
        self.inplanes = self.INIT_DIM
        self.network_initialization(in_channels, out_channels, D)
        self.weight_initialization()

    def weight_initialization(self):
        for m in self.modules():
            if isinstance(m, ME.MinkowskiConvolution):
                ME.utils.kaiming_normal_(m.kernel, mode="fan_out", nonlinearity="relu")
            if isinstance(m, ME.MinkowskiBatchNorm):
                nn.init.constant_(m.bn.weight, 1)
                nn.init.constant_(m.bn.bias, 0)

    def _make_layer(self, block, planes, blocks, stride=1, dilation=1):
        downsample = None
        if stride != 1 or self.inplanes != planes * block.expansion:
            downsample = nn.Sequential(
                ME.MinkowskiConvolution(
                    self.inplanes, planes * block.expansion, kernel_size=1, stride=stride, dimension=self.D
                ),
                ME.MinkowskiBatchNorm(planes * block.expansion),
            )
        layers = [
            block(self.inplanes, planes, stride=stride, dilation=dilation, downsample=downsample, dimension=self.D)
        ]
        self.inplanes = planes * block.expansion
        for _ in range(1, blocks):
            layers.append(block(self.inplanes, planes, dilation=dilation, dimension=self.D))
        return nn.Sequential(*layers)


class MinkUNetBase(ResNetBase):
    PLANES = (32, 64, 128, 256, 256, 128, 96, 96)
    LAYERS = (2, 2, 2, 2, 2, 2, 2, 2)
    STEM: int | tuple[int, ...] = 5
    STEP: int | tuple[int, ...] = 2

    def network_initialization(self, in_channels, out_channels, D):
        def sizes(value):
            return value if isinstance(value, int) else list(value)

        def down():
            return ME.MinkowskiConvolution(self.inplanes, self.inplanes, kernel_size=step, stride=step, dimension=D)

        def up(planes):
            return ME.MinkowskiConvolutionTranspose(self.inplanes, planes, kernel_size=step, stride=step, dimension=D)

        step = sizes(self.STEP)
        expansion = self.BLOCK.expansion
        planes, layers = self.PLANES, self.LAYERS
        self.conv0p1s1 = ME.MinkowskiConvolution(in_channels, self.inplanes, kernel_size=sizes(self.STEM), dimension=D)
        self.bn0 = ME.MinkowskiBatchNorm(self.inplanes)

        self.conv1p1s2, self.bn1 = down(), ME.MinkowskiBatchNorm(self.inplanes)
        self.block1 = self._make_layer(self.BLOCK, planes[0], layers[0])
        self.conv2p2s2, self.bn2 = down(), ME.MinkowskiBatchNorm(self.inplanes)
        self.block2 = self._make_layer(self.BLOCK, planes[1], layers[1])
        self.conv3p4s2, self.bn3 = down(), ME.MinkowskiBatchNorm(self.inplanes)
        self.block3 = self._make_layer(self.BLOCK, planes[2], layers[2])
        self.conv4p8s2, self.bn4 = down(), ME.MinkowskiBatchNorm(self.inplanes)
        self.block4 = self._make_layer(self.BLOCK, planes[3], layers[3])

        self.convtr4p16s2, self.bntr4 = up(planes[4]), ME.MinkowskiBatchNorm(planes[4])
        self.inplanes = planes[4] + planes[2] * expansion
        self.block5 = self._make_layer(self.BLOCK, planes[4], layers[4])
        self.convtr5p8s2, self.bntr5 = up(planes[5]), ME.MinkowskiBatchNorm(planes[5])
        self.inplanes = planes[5] + planes[1] * expansion
        self.block6 = self._make_layer(self.BLOCK, planes[5], layers[5])
        self.convtr6p4s2, self.bntr6 = up(planes[6]), ME.MinkowskiBatchNorm(planes[6])
        self.inplanes = planes[6] + planes[0] * expansion
        self.block7 = self._make_layer(self.BLOCK, planes[6], layers[6])
        self.convtr7p2s2, self.bntr7 = up(planes[7]), ME.MinkowskiBatchNorm(planes[7])
        self.inplanes = planes[7] + self.INIT_DIM
        self.block8 = self._make_layer(self.BLOCK, planes[7], layers[7])

        self.final = ME.MinkowskiConvolution(planes[7] * expansion, out_channels, kernel_size=1, bias=True, dimension=D)
        self.relu = ME.MinkowskiReLU(inplace=True)

    def forward(self, x):
        out_p1 = self.relu(self.bn0(self.conv0p1s1(x)))
        out_b1p2 = self.block1(self.relu(self.bn1(self.conv1p1s2(out_p1))))
        out_b2p4 = self.block2(self.relu(self.bn2(self.conv2p2s2(out_b1p2))))
        out_b3p8 = self.block3(self.relu(self.bn3(self.conv3p4s2(out_b2p4))))
        out = self.block4(self.relu(self.bn4(self.conv4p8s2(out_b3p8))))

        out = self.relu(self.bntr4(self.convtr4p16s2(out)))
        out = self.block5(ME.cat(out, out_b3p8))
        out = self.relu(self.bntr5(self.convtr5p8s2(out)))
        out = self.block6(ME.cat(out, out_b2p4))
        out = self.relu(self.bntr6(self.convtr6p4s2(out)))
        out = self.block7(ME.cat(out, out_b1p2))
        out = self.relu(self.bntr7(self.convtr7p2s2(out)))
        out = self.block8(ME.cat(out, out_p1))
        return self.final(out)


LAYERS = {
    "14": (BasicBlock, (1,) * 8),
    "18": (BasicBlock, (2,) * 8),
    "34": (BasicBlock, (2, 3, 4, 6, 2, 2, 2, 2)),
    "50": (Bottleneck, (2, 3, 4, 6, 2, 2, 2, 2)),
    "101": (Bottleneck, (2, 3, 4, 23, 2, 2, 2, 2)),
}
DECODERS = {"": (256, 128, 96, 96), "A": (256, 128, 64, 64), "B": (256, 128, 64, 32), "C": (256, 128, 96, 96)}
SHALLOW_A = (128, 128, 96, 96)  # 14A and 18A


def _variant(depth, letter):
    block, layers = LAYERS[depth]
    decoder = SHALLOW_A if letter == "A" and depth in ("14", "18") else DECODERS[letter]
    facts = {"BLOCK": block, "LAYERS": layers, "PLANES": (32, 64, 128, 256, *decoder)}
    return type(f"MinkUNet{depth}{letter}", (MinkUNetBase,), {"__module__": __name__, **facts})


# MinkUNet14, MinkUNet14A, ..., MinkUNet34C, ..., MinkUNet101C
VARIANTS = {kind.__name__: kind for kind in (_variant(depth, letter) for depth in LAYERS for letter in DECODERS)}
globals().update(VARIANTS)


def build(name="MinkUNet34", in_channels=3, out_channels=20, D=3):
    return VARIANTS[name](in_channels, out_channels, D)


def batch(scene, device, dtype):
    """A SparseTensor of coordinates collated from the items of the batch."""
    items = [scene.coords[scene.coords[:, 0] == item, 1:] for item in range(scene.batch_size)]
    coordinates = ME.utils.batched_coordinates(items, dtype=torch.int32)
    features = scene.features.to(device, dtype)
    return (ME.SparseTensor(features, coordinates=coordinates.to(device)),)
