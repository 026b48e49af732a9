"""The two networks of the demo, written against `spconv.pytorch` the way projects write them.

This module is imported after a library has been chosen to answer `import spconv.pytorch`; nothing
in it knows which one that is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

import spconv.pytorch as spconv
import torch
from torch import nn

__all__ = ["ResidualUNet", "SecondEncoder"]

_norm = partial(nn.BatchNorm1d, eps=1e-3, momentum=0.01)


def _conv_norm_relu(conv: nn.Module, channels: int) -> nn.Module:
    return spconv.SparseSequential(
        OrderedDict(conv=conv, norm=_norm(channels), relu=nn.ReLU(inplace=True))
    )


def _subm(c_in: int, c_out: int, key: str) -> nn.Module:
    conv = spconv.SubMConv3d(c_in, c_out, 3, padding=1, bias=False, indice_key=key)
    return _conv_norm_relu(conv, c_out)


def _down(c_in: int, c_out: int, key: str, padding: int | tuple[int, int, int] = 1) -> nn.Module:
    conv = spconv.SparseConv3d(
        c_in, c_out, 3, stride=2, padding=padding, bias=False, indice_key=key
    )
    return _conv_norm_relu(conv, c_out)


class SecondEncoder(spconv.SparseModule):
    """The middle encoder of SECOND: three strided stages, then the height is squeezed.

    Takes [N, in_channels] features on a z, y, x grid of at least 25 layers in z and returns a
    sparse tensor with 128 channels, eight times coarser in y and x. `.dense()` of it, with channels
    and z merged, is the bird's-eye-view image that a detection head reads.
    """

    def __init__(self, in_channels: int = 4) -> None:
        super().__init__()
        self.conv_input = _subm(in_channels, 16, "subm1")
        self.conv1 = _subm(16, 16, "subm1")
        self.conv2 = self._stage(16, 32, 2)
        self.conv3 = self._stage(32, 64, 3)
        self.conv4 = self._stage(64, 64, 4, padding=(0, 1, 1))
        out = spconv.SparseConv3d(
            64, 128, (3, 1, 1), stride=(2, 1, 1), bias=False, indice_key="spconv_down2"
        )
        self.conv_out = _conv_norm_relu(out, 128)

    @staticmethod
    def _stage(
        c_in: int, c_out: int, level: int, padding: int | tuple[int, int, int] = 1
    ) -> nn.Module:
        return spconv.SparseSequential(
            OrderedDict(
                down=_down(c_in, c_out, f"spconv{level}", padding),
                subm_a=_subm(c_out, c_out, f"subm{level}"),
                subm_b=_subm(c_out, c_out, f"subm{level}"),
            )
        )

    def forward(self, x: spconv.SparseConvTensor) -> spconv.SparseConvTensor:
        x = self.conv1(self.conv_input(x))
        return self.conv_out(self.conv4(self.conv3(self.conv2(x))))


class ResidualBlock(spconv.SparseModule):
    """Two submanifold convolutions and a skip, projected by a 1x1 layer where the widths differ."""

    def __init__(self, c_in: int, c_out: int, key: str) -> None:
        super().__init__()
        self.conv1 = spconv.SubMConv3d(c_in, c_out, 3, padding=1, bias=False, indice_key=key)
        self.norm1 = _norm(c_out)
        self.conv2 = spconv.SubMConv3d(c_out, c_out, 3, padding=1, bias=False, indice_key=key)
        self.norm2 = _norm(c_out)
        self.relu = nn.ReLU()
        self.proj: nn.Module = spconv.Identity()
        if c_in != c_out:
            self.proj = spconv.SparseSequential(
                OrderedDict(conv=spconv.SubMConv3d(c_in, c_out, 1, bias=False), norm=_norm(c_out))
            )

    def forward(self, x: spconv.SparseConvTensor) -> spconv.SparseConvTensor:
        y = self.conv1(x)
        y = y.replace_feature(self.relu(self.norm1(y.features)))
        y = self.conv2(y)
        y = y.replace_feature(self.norm2(y.features) + self.proj(x).features)
        return y.replace_feature(self.relu(y.features))


class EncoderStage(spconv.SparseModule):
    """Halve the grid, then residual blocks."""

    def __init__(self, c_in: int, c_out: int, count: int, level: int) -> None:
        super().__init__()
        key = f"subm{level}"
        conv = spconv.SparseConv3d(
            c_in, c_out, 2, stride=2, bias=False, indice_key=f"spconv{level}"
        )
        self.down = _conv_norm_relu(conv, c_out)
        blocks = [(f"{i + 1}", ResidualBlock(c_out, c_out, key)) for i in range(count)]
        self.blocks = spconv.SparseSequential(OrderedDict(blocks))

    def forward(self, x: spconv.SparseConvTensor) -> spconv.SparseConvTensor:
        return self.blocks(self.down(x))


class DecoderStage(spconv.SparseModule):
    """Back to the voxels that the stage of the same level halved; its input joins as a skip."""

    def __init__(self, c_in: int, c_skip: int, c_out: int, level: int) -> None:
        super().__init__()
        conv = spconv.SparseInverseConv3d(c_in, c_out, 2, bias=False, indice_key=f"spconv{level}")
        self.up = _conv_norm_relu(conv, c_out)
        self.block1 = ResidualBlock(c_out + c_skip, c_out, f"subm{level - 1}")
        self.block2 = ResidualBlock(c_out, c_out, f"subm{level - 1}")

    def forward(
        self, x: spconv.SparseConvTensor, skip: spconv.SparseConvTensor
    ) -> spconv.SparseConvTensor:
        x = self.up(x)
        x = x.replace_feature(torch.cat([x.features, skip.features], 1))
        return self.block2(self.block1(x))


class ResidualUNet(spconv.SparseModule):
    """A residual U-Net of 34 layers: stem 5x5x5, four strided stages, four inverse ones, a head.

    Takes [N, in_channels] features and returns [N, classes] on the same voxels. The spatial shape
    should be a multiple of 16, so that no voxel at the border loses its parent.
    """

    def __init__(
        self,
        in_channels: int = 4,
        classes: int = 20,
        encoder: Sequence[int] = (32, 64, 128, 256),
        decoder: Sequence[int] = (256, 128, 96, 96),
        blocks: Sequence[int] = (2, 3, 4, 6),
        stem: int = 32,
    ) -> None:
        super().__init__()
        conv = spconv.SubMConv3d(in_channels, stem, 5, padding=2, bias=False, indice_key="stem")
        self.stem = _conv_norm_relu(conv, stem)
        widths = [stem, *encoder]
        levels = range(1, len(encoder) + 1)
        # Keyed by level, so that "encoder.2" and "decoder.2" belong together.
        self.encoder, self.decoder = nn.ModuleDict(), nn.ModuleDict()
        for level, count in zip(levels, blocks, strict=True):
            self.encoder[str(level)] = EncoderStage(widths[level - 1], widths[level], count, level)
        c_in = widths[-1]
        for level, width in zip(reversed(levels), decoder, strict=True):
            self.decoder[str(level)] = DecoderStage(c_in, widths[level - 1], width, level)
            c_in = width
        self.head = spconv.SubMConv3d(c_in, classes, 1, bias=True)

    def forward(self, x: spconv.SparseConvTensor) -> spconv.SparseConvTensor:
        x = self.stem(x)
        skips = []
        for stage in self.encoder.values():
            skips.append(x)
            x = stage(x)
        for stage in self.decoder.values():
            x = stage(x, skips.pop())
        return self.head(x)
