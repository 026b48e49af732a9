"""The networks that are timed, once per user API.

`sp` is `spconv.pytorch` or anything with its names; `ts` is `torchsparse`.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn

PLANES = (32, 64, 128, 256, 256, 128, 96, 96)
BLOCKS = (2, 3, 4, 6, 2, 2, 2, 2)


def norm(channels):
    return nn.BatchNorm1d(channels, eps=1e-3, momentum=0.01)


class Second(nn.Module):
    """SECOND's encoder: 12 sparse convolutions, strides 1, 2, 2, 2, then a (3, 1, 1) squeeze.
    Coordinates z, y, x."""

    def __init__(self, sp, c_in=4):
        super().__init__()

        def subm(a, b, key):
            conv = sp.SubMConv3d(a, b, 3, padding=1, bias=False, indice_key=key)
            return sp.SparseSequential(conv, norm(b), nn.ReLU())

        def down(a, b, key, kernel=3, stride=2, padding=1):
            conv = sp.SparseConv3d(
                a, b, kernel, stride=stride, padding=padding, bias=False, indice_key=key
            )
            return sp.SparseSequential(conv, norm(b), nn.ReLU())

        self.net = sp.SparseSequential(
            subm(c_in, 16, "subm1"), subm(16, 16, "subm1"),
            down(16, 32, "spconv2"), subm(32, 32, "subm2"), subm(32, 32, "subm2"),
            down(32, 64, "spconv3"), subm(64, 64, "subm3"), subm(64, 64, "subm3"),
            down(64, 64, "spconv4", padding=(0, 1, 1)),
            subm(64, 64, "subm4"), subm(64, 64, "subm4"),
            down(64, 128, "down5", (3, 1, 1), (2, 1, 1), 0),
        )  # fmt: skip

    def forward(self, x):
        return self.net(x)


def residual_block(sp, c_in, c_out, key):
    """Two 3x3x3 layers and a skip; derives from the API's own SparseModule so that containers hand
    it the tensor."""

    class Block(sp.SparseModule):
        def __init__(self):
            super().__init__()
            self.conv1 = sp.SubMConv3d(c_in, c_out, 3, padding=1, bias=False, indice_key=key)
            self.conv2 = sp.SubMConv3d(c_out, c_out, 3, padding=1, bias=False, indice_key=key)
            self.norm1, self.norm2, self.relu = norm(c_out), norm(c_out), nn.ReLU()
            self.skip = None
            if c_in != c_out:
                self.skip = sp.SparseSequential(
                    sp.SubMConv3d(c_in, c_out, 1, bias=False), norm(c_out)
                )

        def forward(self, x):
            y = self.conv1(x)
            y = self.conv2(y.replace_feature(self.relu(self.norm1(y.features))))
            y = y.replace_feature(self.norm2(y.features))
            skip = x.features if self.skip is None else self.skip(x).features
            return y.replace_feature(self.relu(y.features + skip))

    return Block()


class UNet(nn.Module):
    """A residual sparse U-Net (MinkUNet34's layout, 48 sparse convolutions, 5x5x5 stem)."""

    def __init__(self, sp, c_in=4, classes=20):
        super().__init__()
        stem = sp.SubMConv3d(c_in, 32, 5, padding=2, bias=False, indice_key="stem")
        self.stem = sp.SparseSequential(stem, norm(32), nn.ReLU())
        self.down, self.encode, self.up, self.decode = (nn.ModuleList() for _ in range(4))
        width, skips = 32, [32]
        for level in range(4):
            out = PLANES[level]
            conv = sp.SparseConv3d(width, out, 2, stride=2, bias=False, indice_key=f"down{level}")
            self.down.append(sp.SparseSequential(conv, norm(out), nn.ReLU()))
            blocks = [
                residual_block(sp, out, out, f"level{level + 1}") for _ in range(BLOCKS[level])
            ]
            self.encode.append(sp.SparseSequential(*blocks))
            width = out
            skips.append(width)
        for level in range(4):
            out, skip = PLANES[4 + level], skips[3 - level]
            conv = sp.SparseInverseConv3d(width, out, 2, bias=False, indice_key=f"down{3 - level}")
            self.up.append(sp.SparseSequential(conv, norm(out), nn.ReLU()))
            first = residual_block(sp, out + skip, out, f"level{3 - level}")
            rest = [
                residual_block(sp, out, out, f"level{3 - level}")
                for _ in range(BLOCKS[4 + level] - 1)
            ]
            self.decode.append(sp.SparseSequential(first, *rest))
            width = out
        self.head = sp.SubMConv3d(width, classes, 1, bias=True)

    def forward(self, x):
        x = self.stem(x)
        skips = [x]
        for down, encode in zip(self.down, self.encode, strict=True):
            x = encode(down(x))
            skips.append(x)
        for level, (up, decode) in enumerate(zip(self.up, self.decode, strict=True)):
            x = up(x)
            x = decode(x.replace_feature(torch.cat([x.features, skips[3 - level].features], 1)))
        return self.head(x)


NETWORKS = {"second": Second, "unet": UNet}


def network_input(name, scan):
    """(coords, spatial shape) in the axis order the network expects."""
    return scan.zyx() if name == "second" else (scan.coords, scan.shape)


class TorchSparseBlock(nn.Module):
    """The residual block in the torchsparse API."""

    def __init__(self, ts, c_in, c_out):
        super().__init__()
        spnn = ts.nn
        self.main = nn.Sequential(
            spnn.Conv3d(c_in, c_out, 3), spnn.BatchNorm(c_out), spnn.ReLU(True),
            spnn.Conv3d(c_out, c_out, 3), spnn.BatchNorm(c_out),
        )  # fmt: skip
        self.skip = nn.Identity()
        if c_in != c_out:
            self.skip = nn.Sequential(spnn.Conv3d(c_in, c_out, 1), spnn.BatchNorm(c_out))
        self.relu = spnn.ReLU(True)

    def forward(self, x):
        return self.relu(self.main(x) + self.skip(x))


class TorchSparseUNet(nn.Module):
    """The residual U-Net in the torchsparse API."""

    def __init__(self, ts, c_in=4, classes=20):
        super().__init__()
        self.cat = ts.cat

        def conv(a, b, kernel, **more):
            layer = ts.nn.Conv3d(a, b, kernel, **more)
            return nn.Sequential(layer, ts.nn.BatchNorm(b), ts.nn.ReLU(True))

        def blocks(a, b, count):
            widths = [a, *[b] * count]
            return nn.Sequential(
                *[TorchSparseBlock(ts, *pair) for pair in itertools.pairwise(widths)]
            )

        self.stem = conv(c_in, 32, 5)
        self.down, self.encode, self.up, self.decode = (nn.ModuleList() for _ in range(4))
        width, skips = 32, [32]
        for out, count in zip(PLANES[:4], BLOCKS[:4], strict=True):
            self.down.append(conv(width, out, 2, stride=2))
            self.encode.append(blocks(out, out, count))
            width = out
            skips.append(width)
        for level, (out, count) in enumerate(zip(PLANES[4:], BLOCKS[4:], strict=True)):
            self.up.append(conv(width, out, 2, stride=2, transposed=True))
            self.decode.append(blocks(out + skips[3 - level], out, count))
            width = out
        self.head = ts.nn.Conv3d(width, classes, 1, bias=True)

    def forward(self, x):
        x = self.stem(x)
        skips = [x]
        for down, encode in zip(self.down, self.encode, strict=True):
            x = encode(down(x))
            skips.append(x)
        for level, (up, decode) in enumerate(zip(self.up, self.decode, strict=True)):
            x = decode(self.cat([up(x), skips[3 - level]]))
        return self.head(x)
