"""One little network per framework, and scenes for it: what replays are tried with in all APIs."""

from __future__ import annotations

import torch
from torch import nn

from tests.adapters.standins import standin  # noqa: F401 - for tests of this folder
from tests.clouds import cloud, features

SHAPE = (6, 5, 7)
NAMES = ("spconv", "torchsparse", "minkowski")


def scene(module, name, seed, device, share=0.2, batch_size=2, shape=SHAPE):
    """A sparse tensor of 4 channels; scenes of a shape and batch size have the same bounds."""
    coords = cloud(shape, batch_size, share=share, seed=seed, device=device)
    corners = [[0, 0, 0, 0], [batch_size - 1, *(extent - 1 for extent in shape)]]
    coords = torch.cat([coords.new_tensor(corners), coords]).unique(dim=0)
    return tensor(module, name, coords, features(len(coords), 4, seed=seed, device=device), shape)


def tensor(module, name, coords, values, shape=SHAPE):
    if name == "spconv":
        return module.SparseConvTensor(values, coords, list(shape), int(coords[:, 0].max()) + 1)
    if name == "torchsparse":
        return module.SparseTensor(values, coords)
    return module.SparseTensor(values, coords)


class Layers:
    """The layers of a framework under one name each."""

    def __init__(self, module, name):
        self.module, self.name = module, name

    def __deepcopy__(self, memo):
        return self  # a framework has no copies

    def conv(self, n_in, n_out, key):
        if self.name == "spconv":
            return self.module.SubMConv3d(n_in, n_out, 3, bias=False, indice_key=key)
        if self.name == "torchsparse":
            return self.module.nn.Conv3d(n_in, n_out, 3)
        return self.module.MinkowskiConvolution(n_in, n_out, kernel_size=3, dimension=3)

    def down(self, n_in, n_out, key):
        if self.name == "spconv":
            return self.module.SparseConv3d(n_in, n_out, 2, 2, bias=False, indice_key=key)
        if self.name == "torchsparse":
            return self.module.nn.Conv3d(n_in, n_out, 2, stride=2)
        make = self.module.MinkowskiConvolution
        return make(n_in, n_out, kernel_size=2, stride=2, dimension=3)

    def up(self, n_in, n_out, key):
        if self.name == "spconv":
            return self.module.SparseInverseConv3d(n_in, n_out, 2, bias=False, indice_key=key)
        if self.name == "torchsparse":
            return self.module.nn.Conv3d(n_in, n_out, 2, stride=2, transposed=True)
        make = self.module.MinkowskiConvolutionTranspose
        return make(n_in, n_out, kernel_size=2, stride=2, dimension=3)

    def norm(self, width):
        if self.name == "torchsparse":
            return self.module.nn.BatchNorm(width)
        if self.name == "minkowski":
            return self.module.MinkowskiBatchNorm(width)
        return nn.BatchNorm1d(width)

    def relu(self):
        if self.name == "torchsparse":
            return self.module.nn.ReLU(True)
        return self.module.MinkowskiReLU() if self.name == "minkowski" else nn.ReLU()

    def sequence(self, *layers):
        kind = self.module.SparseSequential if self.name == "spconv" else nn.Sequential
        return kind(*layers)

    def cat(self, x, y):
        if self.name == "spconv":
            return x.replace_feature(torch.cat([x.features, y.features], 1))
        return self.module.cat([x, y]) if self.name == "torchsparse" else self.module.cat(x, y)


class Network(nn.Module):
    """Two levels down and up again, with a skip connection."""

    def __init__(self, layers, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.cat = layers.cat
        self.stem = layers.sequence(layers.conv(4, width, "a"), layers.norm(width), layers.relu())
        self.down = layers.sequence(layers.down(width, width, "d"), layers.norm(width), layers.relu())
        self.deep = layers.conv(width, width, "b")
        self.up = layers.up(width, width, "d")
        self.head = layers.sequence(layers.norm(2 * width), layers.conv(2 * width, 4, "a"))

    def forward(self, x):
        x = self.stem(x)
        y = self.deep(self.down(x))
        return {"out": self.head(self.cat(self.up(y), x)), "deep": y}


def network(module, name, device):
    made = Network(Layers(module, name)).to(device)
    for one in made.modules():
        if isinstance(one, nn.BatchNorm1d):
            nn.init.normal_(one.running_mean, std=0.1)
            nn.init.uniform_(one.running_var, 0.5, 2)
    return made
