"""A program's own class around sparse tensors, and modules that pass it on: what replays of such
programs are tried with."""

from __future__ import annotations

import torch
from torch import nn

from sparse_bridge.adapters import protocol

from . import apis


class Grid:
    """Around a framework's sparse tensor, rows batch by batch: which they are, how large a voxel
    is, and what modules keep for later ones."""

    def __init__(self, data, layout=None, scale=(1, 1, 1), spatial_cache=None):
        self.data, self._scale = data, scale
        self._layout = self._found() if layout is None else layout
        self._shape = torch.Size([2, *self.feats.shape[1:]])
        self._spatial_cache = {} if spatial_cache is None else spatial_cache

    def _found(self):
        counts = torch.bincount(self.coords[:, 0], minlength=2)
        ends = counts.cumsum(0).tolist()
        return [slice(end - n, end) for end, n in zip(ends, counts.tolist(), strict=True)]

    @property
    def layout(self):
        return self._layout

    @property
    def feats(self):
        return protocol.of(self.data).features_of(self.data)

    @property
    def coords(self):
        return protocol.of(self.data).coordinates_of(self.data)

    def replace(self, feats):
        data = protocol.of(self.data).with_features(self.data, feats)
        return self.around(data)

    def around(self, data):
        return Grid(data, self._layout, self._scale, self._spatial_cache)

    def __add__(self, other):
        return self.replace(self.feats + other.feats)

    def register(self, key, value):
        scale = str(self._scale)
        if scale not in self._spatial_cache:
            self._spatial_cache[scale] = {}
        self._spatial_cache[scale][key] = value

    def registered(self, key):
        return self._spatial_cache.get(str(self._scale), {}).get(key)


class Conv(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return x.around(self.layer(x.data))


class LayerNorm(nn.LayerNorm):
    def forward(self, x):
        return x.replace(super().forward(x.feats))


class Linear(nn.Linear):
    """One product of a column after another: a row has the same bits beside any others. Not so
    torch's products in fp32."""

    def forward(self, x):
        columns = zip(x.unsqueeze(-1).unbind(1), self.weight.unbind(1), strict=True)
        return sum((value * weight for value, weight in columns), self.bias)


class Block(nn.Module):
    """Two layers and a sum."""

    def __init__(self, layers, width, key):
        super().__init__()
        self.norm, self.norm2 = LayerNorm(width), LayerNorm(width)
        self.conv, self.conv2 = (Conv(layers.conv(width, width, key)) for _ in range(2))

    def forward(self, x):
        h = self.conv(self.norm(x))
        h = h.replace(nn.functional.leaky_relu(self.norm2(h).feats))
        return self.conv2(h) + x


class Stack(nn.Sequential):
    """What may be replayed: two blocks, and something at a place among them."""

    def __init__(self, layers, more=None, place=1):
        torch.manual_seed(0)
        super().__init__(*(Block(layers, 4, key) for key in "ab"))
        if more is not None:
            self.insert(place, more)


def grid(module, name, seed, device, share=None):
    """Rows batch by batch, of which there is another number in every scene."""
    x = apis.scene(module, name, seed, device, 0.3 + 0.002 * seed if share is None else share)
    return Grid(x)


def stack(module, name, device, *more):
    return Stack(apis.Layers(module, name), *more).to(device)
