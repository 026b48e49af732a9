"""RISE: a robot's action from one coloured point cloud. A sparse ResNet14 turns it into a hundred
tokens, a transformer reads them.

Source: the paper (arXiv 2404.12281) and the project's public layer stack. The diffusion head has no
sparse layer; a linear one takes its place.
"""

from __future__ import annotations

import MinkowskiEngine as ME
import torch
from torch import nn

from .res16unet import BasicBlock, Layers


class ResNet14(ME.MinkowskiNetwork):
    """Stem, a pool that sums, and four strided stages: tensor stride 32."""

    LAYERS = (1, 1, 1, 1)
    PLANES = (64, 128, 256, 512)
    INIT_DIM = 64

    def __init__(self, in_channels, out_channels, conv1_kernel_size=3, bn_momentum=0.02, D=3):
        super().__init__(D)
        self.inplanes = self.INIT_DIM
        self.conv1 = Layers.conv(in_channels, self.inplanes, conv1_kernel_size, D=D)
        self.bn1 = Layers.norm(self.inplanes, D, bn_momentum)
        self.relu = ME.MinkowskiReLU(inplace=True)
        kernel_generator = ME.KernelGenerator(
            2, 2, 1, region_type=ME.RegionType.HYPER_CUBE, axis_types=None, dimension=D
        )
        self.pool = ME.MinkowskiSumPooling(
            kernel_size=2, stride=2, dilation=1, kernel_generator=kernel_generator, dimension=D
        )
        for level, (planes, count) in enumerate(zip(self.PLANES, self.LAYERS, strict=True)):
            setattr(self, f"layer{level + 1}", self._make_layer(planes, count, D))
        self.final = Layers.conv(self.PLANES[-1], out_channels, 1, bias=True, D=D)

    def _make_layer(self, planes, count, D):
        downsample = nn.Sequential(Layers.conv(self.inplanes, planes, 1, stride=2, D=D), Layers.norm(planes, D, 0.1))
        first = BasicBlock(self.inplanes, planes, 2, 1, downsample, bn_momentum=0.1, D=D)
        self.inplanes = planes
        rest = [BasicBlock(planes, planes, bn_momentum=0.1, D=D) for _ in range(1, count)]
        return nn.Sequential(first, *rest)

    def forward(self, x):
        x = self.pool(self.relu(self.bn1(self.conv1(x))))
        return self.final(self.layer4(self.layer3(self.layer2(self.layer1(x)))))


class SparsePositionalEncoding(nn.Module):
    """Sines and cosines of voxel coordinates, a third of the channels for each axis."""

    def __init__(self, channels, temperature=10000, max_pos=800):
        super().__init__()
        self.max_pos = max_pos
        self.steps = [channels // 3, channels // 3, channels - 2 * (channels // 3)]
        self.temperature = temperature

    def forward(self, coords, dtype):
        place = (coords[:, 1:4] + self.max_pos // 2).clamp(0, self.max_pos - 1).to(dtype)
        parts = []
        for axis, steps in enumerate(self.steps):
            turn = torch.arange(steps, device=coords.device) // 2 * 2 / steps
            angle = place[:, axis, None] / self.temperature ** turn.to(dtype)
            parts += [torch.stack([angle[:, 0::2].sin(), angle[:, 1::2].cos()], 2).flatten(1)]
        return torch.cat(parts, dim=1)


class Sparse3DEncoder(nn.Module):
    """Tokens [B, T, C] of the voxels of every item, their positions, and which are padding."""

    def __init__(self, input_dim, output_dim):
        super().__init__()
        self.output_dim = output_dim
        self.cloud_encoder = ResNet14(input_dim, output_dim)
        self.position_embedding = SparsePositionalEncoding(output_dim)

    def forward(self, sinput, batch_size, max_num_token=100):
        soutput = self.cloud_encoder(sinput)
        feats, coords = soutput.F, soutput.C
        places = self.position_embedding(coords, feats.dtype)
        tokens = feats.new_zeros(batch_size, max_num_token, self.output_dim)
        positions = torch.zeros_like(tokens)
        padding = torch.ones(tokens.shape[:2], dtype=torch.bool, device=feats.device)
        for item in range(batch_size):
            mask = coords[:, 0] == item
            count = min(max_num_token, int(mask.sum()))
            tokens[item, :count] = feats[mask][:count]
            positions[item, :count] = places[mask][:count]
            padding[item, :count] = False
        return tokens, positions, padding


class Attention(nn.Module):
    """Post-norm attention of queries to keys that carry positions, and a feed-forward part."""

    def __init__(self, channels, heads, dim_feedforward):
        super().__init__()
        self.attn = nn.MultiheadAttention(channels, heads, batch_first=True)
        self.linear1 = nn.Linear(channels, dim_feedforward)
        self.linear2 = nn.Linear(dim_feedforward, channels)
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)

    def forward(self, queries, places, memory, positions, padding):
        keys = memory + positions
        found = self.attn(queries + places, keys, memory, key_padding_mask=padding)[0]
        queries = self.norm1(queries + found)
        return self.norm2(queries + self.linear2(self.linear1(queries).relu()))


class RISE(nn.Module):
    def __init__(
        self,
        num_action=20,
        input_dim=6,
        action_dim=10,
        hidden_dim=512,
        nheads=8,
        num_encoder_layers=4,
        num_decoder_layers=1,
        dim_feedforward=2048,
    ):
        super().__init__()
        self.sparse_encoder = Sparse3DEncoder(input_dim, hidden_dim)
        layer = (hidden_dim, nheads, dim_feedforward)
        self.encoder = nn.ModuleList(Attention(*layer) for _ in range(num_encoder_layers))
        self.decoder = nn.ModuleList(Attention(*layer) for _ in range(num_decoder_layers))
        self.readout_embed = nn.Embedding(1, hidden_dim)
        self.action_head = nn.Linear(hidden_dim, num_action * action_dim)

    def forward(self, cloud, batch_size):
        tokens, positions, padding = self.sparse_encoder(cloud, batch_size)
        padding[:, 0] &= ~padding.all(dim=1)  # an item without voxels reads one token of zeros
        for layer in self.encoder:
            tokens = layer(tokens, positions, tokens, positions, padding)
        readout = self.readout_embed.weight.expand(batch_size, -1, -1)
        for layer in self.decoder:
            readout = layer(readout, torch.zeros_like(readout), tokens, positions, padding)
        return self.action_head(readout[:, 0])


def build(**options):
    return RISE(**options)


def batch(scene, device, dtype):
    """(positions and colours on voxels around the origin, number of items)."""
    coords = scene.coords.clone()
    coords[:, 1:] -= torch.tensor(scene.grid, dtype=torch.int32) // 2
    features = scene.features.to(device, dtype)
    return ME.SparseTensor(features, coords.to(device)), scene.batch_size
