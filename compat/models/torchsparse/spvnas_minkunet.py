"""SPVNAS's MinkUNet: torchsparse blocks as its model zoo writes them (every release).

Source: layer stack S12 of the usage notes.
"""

from __future__ import annotations

import torchsparse
import torchsparse.nn as spnn
from torch import nn

CHANNELS = (32, 32, 64, 128, 256, 256, 128, 96, 96)


class BasicConvolutionBlock(nn.Module):
    def __init__(self, inc, outc, ks=3, stride=1, dilation=1):
        super().__init__()
        self.net = nn.Sequential(
            spnn.Conv3d(inc, outc, kernel_size=ks, dilation=dilation, stride=stride),
            spnn.BatchNorm(outc),
            spnn.ReLU(True),
        )

    def forward(self, x):
        return self.net(x)


class BasicDeconvolutionBlock(nn.Module):
    def __init__(self, inc, outc, ks=3, stride=1):
        super().__init__()
        self.net = nn.Sequential(
            spnn.Conv3d(inc, outc, kernel_size=ks, stride=stride, transposed=True),
            spnn.BatchNorm(outc),
            spnn.ReLU(True),
        )

    def forward(self, x):
        return self.net(x)


class ResidualBlock(nn.Module):
    def __init__(self, inc, outc, ks=3, stride=1, dilation=1):
        super().__init__()
        self.net = nn.Sequential(
            spnn.Conv3d(inc, outc, kernel_size=ks, dilation=dilation, stride=stride),
            spnn.BatchNorm(outc),
            spnn.ReLU(True),
            spnn.Conv3d(outc, outc, kernel_size=ks, dilation=dilation, stride=1),
            spnn.BatchNorm(outc),
        )
        if inc == outc and stride == 1:
            self.downsample = nn.Identity()
        else:
            self.downsample = nn.Sequential(
                spnn.Conv3d(inc, outc, kernel_size=1, dilation=1, stride=stride), spnn.BatchNorm(outc)
            )
        self.relu = spnn.ReLU(True)

    def forward(self, x):
        return self.relu(self.net(x) + self.downsample(x))


def encoder_stage(inc, outc):
    return nn.Sequential(
        BasicConvolutionBlock(inc, inc, ks=2, stride=2), ResidualBlock(inc, outc), ResidualBlock(outc, outc)
    )


def decoder_stage(inc, skip, outc):
    """[upsampling, blocks behind the concatenation]"""
    return nn.ModuleList(
        [
            BasicDeconvolutionBlock(inc, outc, ks=2, stride=2),
            nn.Sequential(ResidualBlock(outc + skip, outc), ResidualBlock(outc, outc)),
        ]
    )


def stem(inc, outc):
    return nn.Sequential(
        spnn.Conv3d(inc, outc, kernel_size=3, stride=1),
        spnn.BatchNorm(outc),
        spnn.ReLU(True),
        spnn.Conv3d(outc, outc, kernel_size=3, stride=1),
        spnn.BatchNorm(outc),
        spnn.ReLU(True),
    )


def initialize_norms(net):
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d):
            nn.init.constant_(module.weight, 1)
            nn.init.constant_(module.bias, 0)


class MinkUNet(nn.Module):
    def __init__(self, in_channels=4, num_classes=19, cr=1.0, channels=CHANNELS):
        super().__init__()
        cs = [int(cr * width) for width in channels]
        self.stem = stem(in_channels, cs[0])
        self.stage1 = encoder_stage(cs[0], cs[1])
        self.stage2 = encoder_stage(cs[1], cs[2])
        self.stage3 = encoder_stage(cs[2], cs[3])
        self.stage4 = encoder_stage(cs[3], cs[4])
        self.up1 = decoder_stage(cs[4], cs[3], cs[5])
        self.up2 = decoder_stage(cs[5], cs[2], cs[6])
        self.up3 = decoder_stage(cs[6], cs[1], cs[7])
        self.up4 = decoder_stage(cs[7], cs[0], cs[8])
        self.classifier = nn.Sequential(nn.Linear(cs[8], num_classes))
        initialize_norms(self)

    def decode(self, up, x, skip):
        return up[1](torchsparse.cat([up[0](x), skip]))

    def forward(self, x):
        x0 = self.stem(x)
        x1 = self.stage1(x0)
        x2 = self.stage2(x1)
        x3 = self.stage3(x2)
        x4 = self.stage4(x3)
        y1 = self.decode(self.up1, x4, x3)
        y2 = self.decode(self.up2, y1, x2)
        y3 = self.decode(self.up3, y2, x1)
        y4 = self.decode(self.up4, y3, x0)
        return self.classifier(y4.F)


def build(**options):
    return MinkUNet(**options)


def batch(scene, device, dtype):
    """One collated SparseTensor, made from samples as a data loader makes them."""
    from torchsparse.utils.collate import sparse_collate_fn

    samples = []
    for item in range(scene.batch_size):
        rows = scene.coords[:, 0] == item
        lidar = torchsparse.SparseTensor(feats=scene.features[rows].numpy(), coords=scene.coords[rows, 1:].numpy())
        samples.append({"lidar": lidar, "file_name": f"{item:06d}"})
    lidar = sparse_collate_fn(samples)["lidar"].to(device)
    lidar.F = lidar.F.to(dtype)
    return (lidar,)
