"""SPINE: tracks and showers of particles in liquid argon, by a U-Net of pre-activation blocks whose
widths grow linearly (UResNet), with a second decoder that proposes points of interest (PPN).

Source: the papers (arXiv 1903.05663, 2006.14745) and the project's public layer stack. Particles
and interactions are then put together by graph networks, which have no sparse layer.
"""

from __future__ import annotations

import itertools

import MinkowskiEngine as ME
import MinkowskiEngine.MinkowskiNonlinearity as MENL
import MinkowskiFunctional as MF
import torch
from torch import nn

SLOPE = 0.33


def activation():
    return MENL.MinkowskiLeakyReLU(negative_slope=SLOPE)


class ResNetBlock(ME.MinkowskiNetwork):
    """Norm, activation and convolution, twice, around a linear shortcut."""

    def __init__(self, in_features, out_features, dimension=3, bias=False):
        super().__init__(dimension)
        self.residual = nn.Identity()
        if in_features != out_features:
            self.residual = ME.MinkowskiLinear(in_features, out_features, bias=bias)
        self.conv1 = ME.MinkowskiConvolution(in_features, out_features, kernel_size=3, dimension=dimension, bias=bias)
        self.norm1 = ME.MinkowskiBatchNorm(num_features=in_features)
        self.act_fn1 = activation()
        self.conv2 = ME.MinkowskiConvolution(out_features, out_features, kernel_size=3, dimension=dimension, bias=bias)
        self.norm2 = ME.MinkowskiBatchNorm(num_features=out_features)
        self.act_fn2 = activation()

    def forward(self, x):
        residual = self.residual(x)
        out = self.conv1(self.act_fn1(self.norm1(x)))
        out = self.conv2(self.act_fn2(self.norm2(out)))
        out += residual
        return out


def blocks(first, width, reps, dimension):
    widths = [first] + [width] * (reps - 1)
    return nn.Sequential(*[ResNetBlock(before, width, dimension) for before in widths])


def resample(kind, before, width, dimension):
    """Norm, activation and a layer between two levels."""
    layer = kind(in_channels=before, out_channels=width, kernel_size=2, stride=2, dimension=dimension)
    return nn.Sequential(ME.MinkowskiBatchNorm(before), activation(), layer)


class Encoder(nn.Module):
    def __init__(self, num_input, planes, reps, dimension):
        super().__init__()
        self.input_layer = ME.MinkowskiConvolution(
            in_channels=num_input, out_channels=planes[0], kernel_size=3, stride=1, dimension=dimension, bias=False
        )
        self.encoding_block = nn.Sequential(*[blocks(p, p, reps, dimension) for p in planes])
        down = [
            resample(ME.MinkowskiConvolution, before, width, dimension) for before, width in itertools.pairwise(planes)
        ]
        self.encoding_conv = nn.Sequential(*down, nn.Sequential())

    def forward(self, x):
        x = self.input_layer(x)
        tensors = [x]
        for block, conv in zip(self.encoding_block, self.encoding_conv, strict=True):
            x = block(x)
            tensors.append(x)
            x = conv(x)
        return tensors, x


class Decoder(nn.Module):
    def __init__(self, planes, reps, dimension):
        super().__init__()
        levels = [(planes[i + 1], planes[i]) for i in reversed(range(len(planes) - 1))]
        up = ME.MinkowskiConvolutionTranspose
        self.decoding_block = nn.Sequential(*[blocks(2 * width, width, reps, dimension) for _, width in levels])
        self.decoding_conv = nn.Sequential(*[resample(up, before, width, dimension) for before, width in levels])

    def joined(self, level, x, skip):
        return self.decoding_block[level](ME.cat(skip, self.decoding_conv[level](x)))


class UResNetDecoder(Decoder):
    def forward(self, x, encoder_tensors):
        tensors = []
        for level in range(len(self.decoding_conv)):
            x = self.joined(level, x, encoder_tensors[-level - 2])
            tensors.append(x)
        return tensors


class UResNet(nn.Module):
    def __init__(self, num_input, planes, reps, dimension):
        super().__init__()
        self.dim = dimension
        self.encoder = Encoder(num_input, planes, reps, dimension)
        self.decoder = UResNetDecoder(planes, reps, dimension)

    def forward(self, data):
        """data: [N, 1 + D + C], one row per voxel: batch index, coordinates, values."""
        coords, features = data[:, : self.dim + 1].int(), data[:, self.dim + 1 :]
        encoder_tensors, final = self.encoder(ME.SparseTensor(features, coordinates=coords))
        return final, self.decoder(final, encoder_tensors)


class PPN(Decoder):
    """Levels that score their voxels; what scores low fades before the next level."""

    def __init__(self, planes, reps, dimension, num_classes):
        super().__init__(planes, reps, dimension)
        self.ppn_masks = nn.ModuleList(ME.MinkowskiLinear(p, 2) for p in reversed(planes[:-1]))
        self.final_block = ResNetBlock(planes[0], planes[0], dimension)
        self.ppn_pixel_pos = ME.MinkowskiLinear(planes[0], dimension)
        self.ppn_type = ME.MinkowskiLinear(planes[0], num_classes)

    def forward(self, x, decoder_tensors):
        layers = []
        for level, skip in enumerate(decoder_tensors):
            x = self.joined(level, x, skip)
            scores = self.ppn_masks[level](x)
            layers.append(scores)
            chances = MF.softmax(scores, dim=1)
            attention = ME.SparseTensor(
                features=chances.F[:, 1:].expand(*x.F.shape),
                coordinate_map_key=chances.coordinate_map_key,
                coordinate_manager=chances.coordinate_manager,
            )
            x = x * attention.detach()
        assert x.C.shape[0] == decoder_tensors[-1].C.shape[0]
        x = self.final_block(x)
        return torch.cat([self.ppn_pixel_pos(x).F, self.ppn_type(x).F, layers[-1].F], dim=1), layers


class UResNetPPN(nn.Module):
    """Semantic class of every voxel, and points of interest near it."""

    def __init__(self, num_input, num_classes, filters, depth, reps, dimension):
        super().__init__()
        planes = [filters * level for level in range(1, depth + 1)]
        self.net = UResNet(num_input, planes, reps, dimension)
        final = [ME.MinkowskiBatchNorm(planes[0]), activation()]
        self.output = nn.Sequential(*final, ME.MinkowskiLinear(planes[0], num_classes))
        self.ppn = PPN(planes, reps, dimension, num_classes)

    def forward(self, data):
        final, decoder_tensors = self.net(data)
        points, layers = self.ppn(final, decoder_tensors)
        return {"segmentation": self.output(decoder_tensors[-1]).F, "ppn_points": points, "ppn_layers": layers}


def build(num_input=1, num_classes=5, filters=32, depth=5, reps=2, dimension=3):
    return UResNetPPN(num_input, num_classes, filters, depth, reps, dimension)


def batch(scene, device, dtype):
    """One row per voxel: batch index, coordinates, deposited energy."""
    energy = scene.features.abs()
    data = torch.cat([scene.coords.float(), energy], dim=1)
    return (data.to(device, dtype),)
