"""Networks in the API of torchsparse, which is the argument `ts`: a residual U-Net, and backbones
that torchsparse brings."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch import nn


def unit(ts: Any, c_in: int, c_out: int, kernel_size: int = 3, **conv: Any) -> nn.Sequential:
    """Convolution, norm and ReLU; `conv`: further arguments of the convolution."""
    layer = ts.nn.Conv3d(c_in, c_out, kernel_size, **conv)
    return nn.Sequential(layer, ts.nn.BatchNorm(c_out), ts.nn.ReLU(True))


class ResidualBlock(nn.Module):
    """Two submanifold convolutions and a skip, projected by a 1x1 layer where the widths differ."""

    def __init__(self, ts: Any, c_in: int, c_out: int) -> None:
        super().__init__()
        second = ts.nn.Conv3d(c_out, c_out, 3)
        self.main = nn.Sequential(*unit(ts, c_in, c_out), second, ts.nn.BatchNorm(c_out))
        self.skip = nn.Sequential()
        if c_in != c_out:
            self.skip.extend([ts.nn.Conv3d(c_in, c_out, 1), ts.nn.BatchNorm(c_out)])
        self.relu = ts.nn.ReLU(True)

    def forward(self, x: Any) -> Any:
        return self.relu(self.main(x) + self.skip(x))


class ResidualUNet(nn.Module):
    """The layout of `networks.spconv.ResidualUNet`: a stem, strided stages, as many transposed
    ones, a head. Takes [N, in_channels] features and returns [N, classes] on the same voxels."""

    def __init__(
        self,
        ts: Any,
        in_channels: int = 4,
        classes: int = 20,
        encoder: Sequence[int] = (32, 64, 128, 256),
        decoder: Sequence[int] = (256, 128, 96, 96),
        blocks: Sequence[int] = (2, 3, 4, 6, 2, 2, 2, 2),
        stem: int = 32,
    ) -> None:
        super().__init__()
        self._cat = ts.cat

        def chain(a: int, b: int, count: int) -> nn.Sequential:
            pairs = itertools.pairwise([a, *[b] * count])
            return nn.Sequential(*(ResidualBlock(ts, *pair) for pair in pairs))

        self.stem = unit(ts, in_channels, stem, 5)
        self.down, self.encode, self.up, self.decode = (nn.ModuleList() for _ in range(4))
        width, skips = stem, [stem]
        for out, count in zip(encoder, blocks, strict=False):
            self.down.append(unit(ts, width, out, 2, stride=2))
            self.encode.append(chain(out, out, count))
            width = out
            skips.append(width)
        skips.pop()
        for out, count in zip(decoder, blocks[len(encoder) :], strict=True):
            self.up.append(unit(ts, width, out, 2, stride=2, transposed=True))
            self.decode.append(chain(out + skips.pop(), out, count))
            width = out
        self.head = ts.nn.Conv3d(width, classes, 1, bias=True)

    def forward(self, x: Any) -> Any:
        skips = [self.stem(x)]
        for down, encode in zip(self.down, self.encode, strict=True):
            skips.append(encode(down(skips[-1])))
        x = skips.pop()
        for up, decode in zip(self.up, self.decode, strict=True):
            x = decode(self._cat([up(x), skips.pop()]))
        return self.head(x)


# (blocks, C_out, kernel size, stride) of every stage: those of torchsparse's SparseResNet21D with
# 5x5x5 kernels for 3x3x3. The paper that made 5x5x5 kernels a benchmark (Spira, MLSys 2026,
# arXiv 2511.20834) was not at hand with its own list of layers, so times are not its times.
LARGE_STAGES = ((3, 16, 5, 1), (3, 32, 5, 2), (3, 64, 5, 2), (3, 128, 5, 2), (1, 128, (1, 3, 1), (1, 2, 1)))
BACKBONES = ("resnet21d", "unet42", "resnet_large")


class Backbone(nn.Module):
    """One of `BACKBONES`: `SparseResNet21D` or `SparseResUNet42` of `ts.backbones`, which has to be
    imported, or the former's class with the stages `LARGE_STAGES`.

    Takes [N, in_channels] features and returns the last of the sparse tensors that the backbone
    makes: of the residual networks [M, 128] on voxels eight times coarser (sixteen times in y), of
    the U-Net [N, 96] on the voxels of the input.
    """

    def __init__(self, ts: Any, name: str, in_channels: int = 4, width: float = 1.0) -> None:
        super().__init__()
        own = ts.backbones
        how = {"in_channels": in_channels, "width_multiplier": width}
        if name == "resnet_large":
            self.net = own.resnet.SparseResNet(list(LARGE_STAGES), **how)
        else:
            network = {"resnet21d": own.SparseResNet21D, "unet42": own.SparseResUNet42}[name]
            self.net = network(**how)

    def forward(self, x: Any) -> Any:
        return self.net(x)[-1]
