"""SECOND and a residual U-Net in the API of `spconv.pytorch`, which is the argument `sp`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def norm(channels: int, momentum: float = 0.01) -> nn.Module:
    """Batch norm as detection projects set it."""
    return nn.BatchNorm1d(channels, eps=1e-3, momentum=momentum)


def _unit(sp: Any, conv: Any, momentum: float = 0.01) -> Any:
    """Convolution, norm and ReLU in the framework's own container."""
    layers = OrderedDict(conv=conv, norm=norm(conv.out_channels, momentum), relu=nn.ReLU())
    return sp.SparseSequential(layers)


class Second(nn.Module):
    """The middle encoder of SECOND: three strided stages, then the height is squeezed.

    Takes [N, in_channels] features on a z, y, x grid of at least 25 layers in z and returns a
    sparse tensor with `out_channels` channels, eight times coarser in y and x. `.dense()` of it,
    with channels and z merged, is the bird's-eye-view image that a detection head reads.
    """

    def __init__(
        self,
        sp: Any,
        in_channels: int = 4,
        widths: Sequence[int] = (16, 32, 64, 64),
        out_channels: int = 128,
        momentum: float = 0.01,
    ) -> None:
        super().__init__()

        def same(c_in: int, c_out: int, level: int) -> Any:
            key = f"subm{level}"
            conv = sp.SubMConv3d(c_in, c_out, 3, padding=1, bias=False, indice_key=key)
            return _unit(sp, conv, momentum)

        def stage(c_in: int, c_out: int, level: int, padding: int | tuple[int, ...] = 1) -> Any:
            conv = sp.SparseConv3d(c_in, c_out, 3, stride=2, padding=padding, bias=False, indice_key=f"spconv{level}")
            down, a, b = _unit(sp, conv, momentum), *(same(c_out, c_out, level) for _ in "ab")
            return sp.SparseSequential(OrderedDict(down=down, subm_a=a, subm_b=b))

        self.conv_input = same(in_channels, widths[0], 1)
        self.conv1 = same(widths[0], widths[0], 1)
        self.conv2 = stage(widths[0], widths[1], 2)
        self.conv3 = stage(widths[1], widths[2], 3)
        self.conv4 = stage(widths[2], widths[3], 4, padding=(0, 1, 1))
        out = sp.SparseConv3d(
            widths[3], out_channels, (3, 1, 1), stride=(2, 1, 1), bias=False, indice_key="spconv_down2"
        )
        self.conv_out = _unit(sp, out, momentum)

    def forward(self, x: Any) -> Any:
        x = self.conv1(self.conv_input(x))
        return self.conv_out(self.conv4(self.conv3(self.conv2(x))))


class ResidualBlock(nn.Module):
    """Two submanifold convolutions and a skip, projected by a 1x1 layer where the widths differ."""

    def __init__(self, sp: Any, c_in: int, c_out: int, key: str) -> None:
        super().__init__()
        self.conv1 = sp.SubMConv3d(c_in, c_out, 3, padding=1, bias=False, indice_key=key)
        self.norm1 = norm(c_out)
        self.conv2 = sp.SubMConv3d(c_out, c_out, 3, padding=1, bias=False, indice_key=key)
        self.norm2 = norm(c_out)
        self.relu = nn.ReLU()
        self.proj = None
        if c_in != c_out:
            pointwise = sp.SubMConv3d(c_in, c_out, 1, bias=False)
            self.proj = sp.SparseSequential(OrderedDict(conv=pointwise, norm=norm(c_out)))

    def forward(self, x: Any) -> Any:
        y = self.conv1(x)
        y = self.conv2(y.replace_feature(self.relu(self.norm1(y.features))))
        skip = x if self.proj is None else self.proj(x)
        y = y.replace_feature(self.norm2(y.features) + skip.features)
        return y.replace_feature(self.relu(y.features))


class EncoderStage(nn.Module):
    """Halve the grid, then residual blocks."""

    def __init__(self, sp: Any, c_in: int, c_out: int, count: int, level: int) -> None:
        super().__init__()
        conv = sp.SparseConv3d(c_in, c_out, 2, stride=2, bias=False, indice_key=f"spconv{level}")
        self.down = _unit(sp, conv)
        blocks = [(f"{i + 1}", ResidualBlock(sp, c_out, c_out, f"subm{level}")) for i in range(count)]
        self.blocks = nn.Sequential(OrderedDict(blocks))

    def forward(self, x: Any) -> Any:
        return self.blocks(self.down(x))


class DecoderStage(nn.Module):
    """Back to the voxels that the stage of the same level halved; its input joins as a skip."""

    def __init__(self, sp: Any, c_in: int, c_skip: int, c_out: int, level: int) -> None:
        super().__init__()
        conv = sp.SparseInverseConv3d(c_in, c_out, 2, bias=False, indice_key=f"spconv{level}")
        self.up = _unit(sp, conv)
        self.block1 = ResidualBlock(sp, c_out + c_skip, c_out, f"subm{level - 1}")
        self.block2 = ResidualBlock(sp, c_out, c_out, f"subm{level - 1}")

    def forward(self, x: Any, skip: Any) -> Any:
        x = self.up(x)
        x = x.replace_feature(torch.cat([x.features, skip.features], 1))
        return self.block2(self.block1(x))


class ResidualUNet(nn.Module):
    """A residual U-Net of 34 layers: stem 5x5x5, four strided stages, four inverse ones, a head.

    Takes [N, in_channels] features and returns [N, classes] on the same voxels. The spatial shape
    should be a multiple of 16, so that no voxel at the border loses its parent.
    """

    def __init__(
        self,
        sp: Any,
        in_channels: int = 4,
        classes: int = 20,
        encoder: Sequence[int] = (32, 64, 128, 256),
        decoder: Sequence[int] = (256, 128, 96, 96),
        blocks: Sequence[int] = (2, 3, 4, 6),
        stem: int = 32,
    ) -> None:
        super().__init__()
        conv = sp.SubMConv3d(in_channels, stem, 5, padding=2, bias=False, indice_key="stem")
        self.stem = _unit(sp, conv)
        widths = [stem, *encoder]
        levels = range(1, len(encoder) + 1)
        # Keyed by level, so that "encoder.2" and "decoder.2" belong together.
        self.encoder, self.decoder = nn.ModuleDict(), nn.ModuleDict()
        for level, count in zip(levels, blocks, strict=True):
            stage = EncoderStage(sp, widths[level - 1], widths[level], count, level)
            self.encoder[str(level)] = stage
        c_in = widths[-1]
        for level, width in zip(reversed(levels), decoder, strict=True):
            self.decoder[str(level)] = DecoderStage(sp, c_in, widths[level - 1], width, level)
            c_in = width
        self.head = sp.SubMConv3d(c_in, classes, 1, bias=True)

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        skips = []
        for stage in self.encoder.values():
            skips.append(x)
            x = stage(x)
        for stage in self.decoder.values():
            x = stage(x, skips.pop())
        return self.head(x)
