"""Swin3D-S: attention in windows of voxels that maps of the coordinate manager find.

Source: the project's description in the usage notes: `insert_and_map`, `kernel_map` with and
without `is_pool`, `get_tensor_stride`. Contextual position tables are replaced by a projection
of the local position.
"""

from __future__ import annotations

import itertools

import MinkowskiEngine as ME
import torch
from torch import nn


def with_features(sp, features):
    return ME.SparseTensor(
        features=features, coordinate_map_key=sp.coordinate_map_key, coordinate_manager=sp.coordinate_manager
    )


class Windows(nn.Module):
    """Slots of a padded table [windows, longest] that the voxels of a tensor fill."""

    def __init__(self, window_size, shift):
        super().__init__()
        self.window_size, self.shift = window_size, shift

    def forward(self, sp):
        """(window per voxel, place in it, number of windows, most voxels in one)"""
        stride = sp.coordinate_map_key.get_tensor_stride()
        step = torch.tensor([1, *stride], device=sp.device)
        edge = self.window_size * step
        edge[0] = 1
        moved = self.window_size // 2 * step if self.shift else torch.zeros_like(step)
        moved[0] = 0
        windows = torch.unique(torch.div(sp.C + moved, edge, rounding_mode="floor"), dim=0)
        places = [torch.arange(self.window_size, device=sp.device)] * 3
        local = torch.stack(torch.meshgrid(*places, indexing="ij"), dim=-1).flatten(0, -2)
        local = nn.functional.pad(local, (1, 0)) * step
        every = (windows * edge - moved).unsqueeze(1) + local.unsqueeze(0)
        cm = sp.coordinate_manager
        query_key, _ = cm.insert_and_map(every.flatten(0, 1).int(), tensor_stride=stride)
        slots, rows = cm.kernel_map(query_key, sp.coordinate_map_key, kernel_size=1, stride=1)[0]
        window = torch.empty_like(rows, dtype=torch.int64)
        window[rows.long()] = slots.long() // len(local)
        counts = torch.bincount(window, minlength=len(windows))
        order = torch.argsort(window, stable=True)
        place = torch.empty_like(window)
        first = counts.cumsum(0) - counts
        place[order] = torch.arange(len(window), device=sp.device) - first[window[order]]
        return window, place, len(windows), int(counts.max())


class WindowAttention(nn.Module):
    def __init__(self, channels, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(channels, 3 * channels)
        self.position = nn.Linear(3, channels)
        self.proj = nn.Linear(channels, channels)

    def forward(self, features, local_position, windows):
        window, place, count, longest = windows
        qkv = self.qkv(features + self.position(local_position))
        table = qkv.new_zeros((count, longest, qkv.shape[1]))
        table = table.index_put((window, place), qkv)
        filled = torch.zeros((count, longest), dtype=torch.bool, device=features.device)
        filled[window, place] = True
        q, k, v = table.view(count, longest, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=filled[:, None, None, :])
        return self.proj(found.transpose(1, 2).flatten(2)[window, place])


class SwinBlock(nn.Module):
    def __init__(self, channels, num_heads, mlp_ratio=4):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.attn = WindowAttention(channels, num_heads)
        self.mlp = nn.Sequential(
            nn.Linear(channels, mlp_ratio * channels), nn.GELU(), nn.Linear(mlp_ratio * channels, channels)
        )

    def forward(self, features, local_position, windows):
        features = features + self.attn(self.norm1(features), local_position, windows)
        return features + self.mlp(self.norm2(features))


class BasicLayer(nn.Module):
    """Blocks whose windows lie alternately on the grid and half a window beside it."""

    def __init__(self, channels, num_heads, window_size, depth):
        super().__init__()
        self.windows = nn.ModuleList(Windows(window_size, shift) for shift in (False, True))
        self.blocks = nn.ModuleList(SwinBlock(channels, num_heads) for _ in range(depth))

    def forward(self, sp, local_position):
        found = [windows(sp) for windows in self.windows]
        features = sp.F
        for index, block in enumerate(self.blocks):
            features = block(features, local_position, found[index % 2])
        return with_features(sp, features)


class GridCoordsDown(nn.Module):
    """Mean positions of the coarser voxels, and the finer positions relative to them."""

    def __init__(self, stride):
        super().__init__()
        self.avg_pool = ME.MinkowskiAvgPooling(kernel_size=stride, stride=stride, dimension=3)
        self.unpool = ME.MinkowskiPoolingTranspose(kernel_size=stride, stride=stride, dimension=3)

    def forward(self, coords_sp):
        coarse = self.avg_pool(coords_sp)
        return coarse, coords_sp.F - self.unpool(coarse).F


class GridDownsample(nn.Module):
    def __init__(self, in_channels, out_channels, stride=2):
        super().__init__()
        self.stride = stride
        self.norm = nn.LayerNorm(in_channels)
        self.linear = nn.Linear(in_channels, out_channels)
        self.pool = ME.MinkowskiMaxPooling(kernel_size=stride, stride=stride, dimension=3)

    def forward(self, sp):
        """(coarser tensor, [2, n] rows of both that belong together)"""
        down = self.pool(with_features(sp, self.linear(self.norm(sp.F))))
        pairs = sp.coordinate_manager.kernel_map(
            sp.coordinate_map_key, down.coordinate_map_key, stride=self.stride, kernel_size=self.stride, is_pool=True
        )[0]
        return down, pairs.long()


class Upsample(nn.Module):
    def __init__(self, channels, out_channels):
        super().__init__()
        self.linear1 = nn.Sequential(nn.LayerNorm(out_channels), nn.Linear(out_channels, out_channels))
        self.linear2 = nn.Sequential(nn.LayerNorm(channels), nn.Linear(channels, out_channels))

    def forward(self, sp, skip, pairs):
        coarse = self.linear2(sp.F)
        features = coarse.new_zeros((len(skip), coarse.shape[1]))
        features = features.index_copy(0, pairs[0], coarse[pairs[1]])
        return with_features(skip, self.linear1(skip.F) + features)


class Swin3DUNet(nn.Module):
    def __init__(
        self,
        in_channels=6,
        num_classes=20,
        channels=(48, 96, 192, 384, 384),
        depths=(2, 4, 9, 4, 4),
        num_heads=(6, 6, 12, 24, 24),
        window_sizes=(5, 7, 7, 7, 7),
    ):
        super().__init__()
        self.stem_layer = nn.Sequential(
            ME.MinkowskiConvolution(in_channels, channels[0], kernel_size=3, dimension=3),
            ME.MinkowskiBatchNorm(channels[0]),
            ME.MinkowskiReLU(inplace=True),
        )
        self.layers = nn.ModuleList(
            BasicLayer(*facts) for facts in zip(channels, num_heads, window_sizes, depths, strict=True)
        )
        pairs = list(itertools.pairwise(channels))
        self.downsamples = nn.ModuleList(GridDownsample(*pair) for pair in pairs)
        self.upsamples = nn.ModuleList(Upsample(width, before) for before, width in pairs)
        self.coords_down = GridCoordsDown(2)
        self.classifier = nn.Sequential(
            nn.Linear(channels[0], channels[0]),
            nn.BatchNorm1d(channels[0]),
            nn.ReLU(inplace=True),
            nn.Linear(channels[0], num_classes),
        )

    def forward(self, sp, coords_sp):
        """sp: features, coords_sp: mean positions in voxels; the same voxels."""
        sp = self.stem_layer(sp)
        skips, maps = [], []
        for index, layer in enumerate(self.layers):
            coarse, local = self.coords_down(coords_sp)
            sp = layer(sp, local.to(sp.F.dtype))
            if index < len(self.downsamples):
                skips.append(sp)
                sp, pairs = self.downsamples[index](sp)
                maps.append(pairs)
                coords_sp = coarse
        for upsample in reversed(self.upsamples):
            sp = upsample(sp, skips.pop(), maps.pop())
        return self.classifier(sp.F)


def build(**options):
    return Swin3DUNet(**options)


def batch(scene, device, dtype):
    """(features, positions in units of voxels) on one set of voxels."""
    sp = ME.SparseTensor(scene.features.to(device, dtype), scene.coords.to(device))
    positions = scene.points / torch.tensor(scene.voxel_size)
    return sp, with_features(sp, positions.to(device, dtype))
