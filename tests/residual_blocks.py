"""Residual blocks as users of each framework write them."""

from __future__ import annotations

import importlib

from torch import nn

__all__ = ["Block", "minkowski_blocks", "replaced", "spconv_blocks", "torchsparse_blocks"]


class Block(nn.Module):
    """conv, norm, ReLU, conv, norm, plus what came in, ReLU; how the frameworks differ is left to
    `change` (a layer on a sparse tensor) and `plus`."""

    def __init__(self, conv, norm, relu, plus, change, skip=None):
        super().__init__()
        self.conv1, self.conv2, self.norm1, self.norm2 = conv(), conv(), norm(8), norm(8)
        self.relu, self.skip, self.plus, self.change = relu, skip, plus, change

    def forward(self, x):
        y = self.change(self.norm1, self.conv1(x))
        y = self.change(self.relu, y)
        y = self.change(self.norm2, self.conv2(y))
        y = self.plus(y, x if self.skip is None else self.skip(x))
        return self.change(self.relu, y)


def replaced(layer, x):
    return x.replace_feature(layer(x.features))


def spconv_block(relu=None, skip=None, plus=None, bias=False):
    import spconv.pytorch as sp

    def added(y, x):
        return y.replace_feature(y.features + x.features)

    def conv():
        return sp.SubMConv3d(8, 8, 3, bias=bias, indice_key="a")

    return Block(conv, nn.BatchNorm1d, relu or nn.ReLU(), plus or added, replaced, skip)


def spconv_blocks(**options):
    import spconv.pytorch as sp

    stem = sp.SparseSequential(sp.SubMConv3d(4, 8, 3, indice_key="a"), nn.BatchNorm1d(8), nn.ReLU())
    return nn.Sequential(stem, spconv_block(**options), spconv_block(**options))


def torchsparse_blocks():
    import torchsparse.nn as spnn

    def conv():
        return spnn.Conv3d(8, 8, 3)

    def block():
        return Block(conv, spnn.BatchNorm, spnn.ReLU(True), lambda y, x: y + x, lambda layer, x: layer(x))

    stem = (spnn.Conv3d(4, 8, 3), spnn.BatchNorm(8), spnn.ReLU(True))
    return nn.Sequential(*stem, block(), block())


def minkowski_blocks():
    ME = importlib.import_module("MinkowskiEngine")
    blocks = importlib.import_module("MinkowskiEngine.modules.resnet_block")

    stem = ME.MinkowskiConvolution(4, 8, kernel_size=3, dimension=3)
    first = (stem, ME.MinkowskiBatchNorm(8), ME.MinkowskiReLU())
    return nn.Sequential(*first, *(blocks.BasicBlock(8, 8, dimension=3) for _ in range(2)))
