"""PaSCo's completion U-Net: sparse encoder, dense bottleneck, growing and pruned decoder.

Source: the project's description in the usage notes: dense / sparse round trips, channelwise
convolution, arithmetic on kernels, decompositions per item.
"""

from __future__ import annotations

import itertools

import MinkowskiEngine as ME
import torch
from torch import nn
from torch.nn import functional as F


class ResidualBlock(ME.MinkowskiModuleBase):
    def __init__(self, channels):
        super().__init__()
        self.net = nn.Sequential(
            ME.MinkowskiConvolution(channels, channels, kernel_size=3, dimension=3),
            ME.MinkowskiBatchNorm(channels),
            ME.MinkowskiLeakyReLU(0.1),
            ME.MinkowskiConvolution(channels, channels, kernel_size=3, dimension=3),
            ME.MinkowskiBatchNorm(channels),
        )
        self.act = ME.MinkowskiLeakyReLU(0.1)

    def forward(self, x):
        return self.act(self.net(x) + x)


class Smoothing(nn.Module):
    """A channelwise convolution that only reads the six face neighbours and the voxel itself."""

    def __init__(self, channels):
        super().__init__()
        self.conv = ME.MinkowskiChannelwiseConvolution(channels, kernel_size=3, dimension=3)
        offset = torch.stack(torch.meshgrid(*[torch.arange(-1, 2)] * 3, indexing="ij"), -1)
        near = offset.reshape(-1, 3).abs().sum(dim=1) <= 1
        self.register_buffer("mask", near.float().view(-1, 1))

    def forward(self, x):
        with torch.no_grad():
            self.conv.kernel.copy_(self.conv.kernel * self.mask.to(self.conv.kernel.dtype))
        return self.conv(x)


class DenseBottleneck(nn.Module):
    """Three-dimensional convolutions on the box around the batch; back to sparse near voxels."""

    def __init__(self, channels):
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv3d(channels, channels, 3, padding=dilation, dilation=dilation) for dilation in (1, 2, 3)
        )

    def forward(self, x):
        stride = torch.tensor(x.tensor_stride, dtype=torch.int32)
        lowest = x.C[:, 1:].min(dim=0).values.cpu().int()
        highest = x.C[:, 1:].max(dim=0).values.cpu().int()
        items = x.coordinate_manager.number_of_unique_batch_indices()
        items = max(items, int(x.C[:, 0].max()) + 1)
        sides = ((highest - lowest) // stride + 1).tolist()
        shape = torch.Size([items, x.F.shape[1], *sides])
        dense, min_coordinate, _ = x.dense(shape=shape, min_coordinate=lowest)
        seen = (dense != 0).any(dim=1, keepdim=True).to(dense.dtype)
        near = F.max_pool3d(seen, kernel_size=3, stride=1, padding=1)
        for conv in self.convs:
            dense = F.leaky_relu(conv(dense), 0.1) + dense
        sparse = ME.to_sparse(dense * near)
        coords = sparse.C.clone()
        coords[:, 1:] = coords[:, 1:] * stride.to(coords) + min_coordinate.to(coords)
        return ME.SparseTensor(
            features=sparse.F,
            coordinates=coords,
            tensor_stride=x.tensor_stride,
            coordinate_manager=x.coordinate_manager,
        )


class UpBlock(nn.Module):
    """Grow, join the encoder by a union, predict classes, drop what looks empty."""

    def __init__(self, channels, out_channels, num_classes):
        super().__init__()
        self.up = nn.Sequential(
            ME.MinkowskiGenerativeConvolutionTranspose(channels, out_channels, kernel_size=2, stride=2, dimension=3),
            ME.MinkowskiBatchNorm(out_channels),
            ME.MinkowskiLeakyReLU(0.1),
        )
        self.block = ResidualBlock(out_channels)
        self.smoothing = Smoothing(out_channels)
        self.head = ME.MinkowskiConvolution(out_channels, num_classes, kernel_size=1, bias=True, dimension=3)
        self.softmax = ME.MinkowskiSoftmax(dim=1)
        self.pruning = ME.MinkowskiPruning()

    def forward(self, x, skip):
        x = self.block(self.up(x) + skip)
        x = x + self.smoothing(x)
        logits = self.head(x)
        empty = self.softmax(logits).F[:, 0]
        keep = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        for rows in x.decomposition_permutations:
            if len(rows):
                keep[rows[torch.topk(-empty[rows], len(rows) // 2 + 1).indices]] = True
        return self.pruning(x, keep), logits


class PaSCo(nn.Module):
    def __init__(self, in_channels=4, num_classes=20, widths=(64, 64, 128, 256)):
        super().__init__()
        self.conv_in = nn.Sequential(
            ME.MinkowskiConvolution(in_channels, widths[0], kernel_size=3, dimension=3),
            ME.MinkowskiBatchNorm(widths[0]),
            ME.MinkowskiLeakyReLU(0.1),
        )
        pairs = list(itertools.pairwise(widths))
        self.encoder = nn.ModuleList(
            nn.Sequential(
                ME.MinkowskiConvolution(before, width, kernel_size=2, stride=2, dimension=3),
                ME.MinkowskiBatchNorm(width),
                ME.MinkowskiLeakyReLU(0.1),
                ResidualBlock(width),
            )
            for before, width in pairs
        )
        self.bottleneck = DenseBottleneck(widths[-1])
        self.decoder = nn.ModuleList(UpBlock(width, before, num_classes) for before, width in reversed(pairs))
        self.global_pool = ME.MinkowskiMaxPooling(kernel_size=2, stride=2, dimension=3)
        self.queries = nn.Linear(widths[0], num_classes)

    def forward(self, in_feat):
        x = self.conv_in(in_feat)
        skips = [x]
        for layer in self.encoder:
            x = layer(x)
            skips.append(x)
        x = self.bottleneck(skips.pop())
        logits = []
        for block in self.decoder:
            x, level = block(x, skips.pop())
            logits.append(level)
        pooled = self.global_pool(x)
        per_item = []
        for item in range(len(pooled.decomposed_coordinates)):
            features = pooled.features_at(item)
            assert len(pooled.coordinates_at(item)) == len(features)
            if len(features):
                per_item.append(self.queries(features).mean(dim=0))
        return logits, torch.stack(per_item)


def build(**options):
    return PaSCo(**options)


def batch(scene, device, dtype, side=256, height=32, merged=4):
    """Voxels `merged` times as large, in a box of side x side x height around each item."""
    coords = scene.coords.clone()
    coords[:, 1:] //= merged
    for item in range(scene.batch_size):
        rows = coords[:, 0] == item
        if rows.any():
            middle = coords[rows, 1:].median(dim=0).values
            coords[rows, 1:] += torch.tensor([side // 2, side // 2, height // 2]).int() - middle
    limits = torch.tensor([side, side, height])
    inside = ((coords[:, 1:] >= 0) & (coords[:, 1:] < limits)).all(dim=1)
    in_feat = ME.SparseTensor(
        features=scene.features[inside].to(device, dtype),
        coordinates=coords[inside].to(device),
        quantization_mode=ME.SparseTensorQuantizationMode.UNWEIGHTED_AVERAGE,
        minkowski_algorithm=ME.MinkowskiAlgorithm.SPEED_OPTIMIZED,
    )
    return (in_feat,)
