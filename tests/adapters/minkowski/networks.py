"""Published networks on MinkowskiEngine, written from their layer stacks.

Every builder takes the namespace `ME` first, so that one definition runs on the stand-in and on the
oracle. Widths are arguments; the defaults are those of the papers' code.
"""

from __future__ import annotations

import torch
from torch import nn

from sparse_bridge.tools.networks import minkowski
from sparse_bridge.tools.networks.minkowski import basic_block

__all__ = ["MinkUNet", "ResUNetBN2C", "basic_block", "mask_decoder_levels"]


class MinkUNet(minkowski.MinkUNet):
    """That remembers its framework, for what is computed beside it."""

    def __init__(self, ME, *args, **options):
        super().__init__(ME, *args, **options)
        self.ME = ME


def mask_decoder_levels(ME, x, coordinates, steps=4):
    """Mask3D: raw positions as features on the finest map, averaged down the levels."""
    pool = ME.MinkowskiAvgPooling(kernel_size=2, stride=2, dimension=3)
    position = ME.SparseTensor(
        features=coordinates, coordinate_map_key=x.coordinate_map_key, coordinate_manager=x.coordinate_manager
    )
    found = [position]
    for _ in range(steps):
        position = pool(position)
        found.append(position)
    return found


class ResUNetBN2C(nn.Module):
    """FCGF: k3 s2 encoder, k3 s2 transposed decoder, row-normalised features."""

    def __init__(
        self,
        ME,
        in_channels=1,
        out_channels=32,
        widths=(32, 64, 128, 256),
        up_widths=(64, 64, 64, 128),
        conv1_kernel_size=7,
        dimension=3,
    ):
        super().__init__()
        self.ME = ME

        def conv(i, o, k, s, kind="MinkowskiConvolution", bias=False):
            return getattr(ME, kind)(
                in_channels=i, out_channels=o, kernel_size=k, stride=s, dilation=1, bias=bias, dimension=dimension
            )

        def block(width):
            return basic_block(ME, width, width, 1, dimension, 0.05)

        def norm(width):
            return ME.MinkowskiBatchNorm(width, momentum=0.05)

        w, t = widths, up_widths
        before = in_channels
        for i, width in enumerate(w, 1):
            k, s = (conv1_kernel_size, 1) if i == 1 else (3, 2)
            setattr(self, f"conv{i}", conv(before, width, k, s))
            setattr(self, f"norm{i}", norm(width))
            setattr(self, f"block{i}", block(width))
            before = width
        for i, before in ((4, w[3]), (3, w[2] + t[3]), (2, w[1] + t[2])):
            up = conv(before, t[i - 1], 3, 2, "MinkowskiConvolutionTranspose")
            setattr(self, f"conv{i}_tr", up)
            setattr(self, f"norm{i}_tr", norm(t[i - 1]))
            setattr(self, f"block{i}_tr", block(t[i - 1]))
        self.conv1_tr = conv(w[0] + t[1], t[0], 1, 1)
        self.final = conv(t[0], out_channels, 1, 1, bias=True)
        self.relu = ME.MinkowskiReLU()

    def forward(self, x):
        skips, out = [], x
        for i in range(1, 5):
            out = getattr(self, f"norm{i}")(getattr(self, f"conv{i}")(out))
            out = self.relu(getattr(self, f"block{i}")(out))
            skips.append(out)
        skips.pop()
        for i in (4, 3, 2):
            out = getattr(self, f"norm{i}_tr")(getattr(self, f"conv{i}_tr")(out))
            out = self.relu(getattr(self, f"block{i}_tr")(out))
            out = self.ME.cat(out, skips.pop())
        out = self.final(self.relu(self.conv1_tr(out)))
        return self.ME.SparseTensor(
            out.F / torch.norm(out.F, p=2, dim=1, keepdim=True),
            coordinate_map_key=out.coordinate_map_key,
            coordinate_manager=out.coordinate_manager,
        )
