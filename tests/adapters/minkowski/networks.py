"""Published networks on MinkowskiEngine, written from their layer stacks.

Every builder takes the namespace `ME` first, so that one definition runs on the stand-in and on the
oracle. Widths are arguments; the defaults are those of the papers' code.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["MinkUNet", "ResUNetBN2C", "basic_block", "mask_decoder_levels"]


def basic_block(ME, inplanes, planes, stride=1, dimension=3, momentum=0.1, make=None):
    """conv k3, BN, relu, conv k3, BN, plus the input (1x1 conv, BN if widths differ), relu."""
    conv = make or (lambda i, o, k, s: ME.MinkowskiConvolution(
        i, o, kernel_size=k, stride=s, dimension=dimension
    ))  # fmt: skip

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = conv(inplanes, planes, 3, stride)
            self.norm1 = ME.MinkowskiBatchNorm(planes, momentum=momentum)
            self.conv2 = conv(planes, planes, 3, 1)
            self.norm2 = ME.MinkowskiBatchNorm(planes, momentum=momentum)
            self.relu = ME.MinkowskiReLU(inplace=True)
            self.downsample = None
            if stride != 1 or inplanes != planes:
                self.downsample = nn.Sequential(
                    conv(inplanes, planes, 1, stride),
                    ME.MinkowskiBatchNorm(planes, momentum=momentum),
                )

        def forward(self, x):
            residual = x if self.downsample is None else self.downsample(x)
            out = self.relu(self.norm1(self.conv1(x)))
            out = self.norm2(self.conv2(out))
            out += residual
            return self.relu(out)

    return Block()


class MinkUNet(nn.Module):
    """MinkUNet34C by default. 14: layers (1,) * 8.  18: (2,) * 8.  Res16UNet34C: momentum .02 and
    kernels through `KernelGenerator`.  4DMOS: stem (5, 5, 5, 1), steps (2, 2, 2, 1)."""

    def __init__(
        self, ME, in_channels=3, out_channels=20, dimension=3, layers=(2, 3, 4, 6, 2, 2, 2, 2),
        planes=(32, 64, 128, 256, 256, 128, 96, 96), init=32, stem=5, step=2, momentum=0.1,
        through_generator=False, levels=False,
    ):  # fmt: skip
        super().__init__()
        self.ME, self.levels = ME, levels

        def conv(i, o, k, s, kind="MinkowskiConvolution", bias=False):
            if not through_generator:
                return getattr(ME, kind)(
                    i, o, kernel_size=k, stride=s, bias=bias, dimension=dimension
                )
            generator = ME.KernelGenerator(
                k, s, dilation=1, region_type=ME.RegionType.HYPER_CUBE, axis_types=None,
                dimension=dimension,
            )  # fmt: skip
            return getattr(ME, kind)(
                in_channels=i, out_channels=o, kernel_size=k, stride=s, dilation=1, bias=bias,
                kernel_generator=generator, dimension=dimension,
            )  # fmt: skip

        def stage(i, o, n):
            blocks = [basic_block(ME, i, o, 1, dimension, momentum, conv)]
            blocks += [basic_block(ME, o, o, 1, dimension, momentum, conv) for _ in range(n - 1)]
            return nn.Sequential(*blocks)

        def norm(width):
            return ME.MinkowskiBatchNorm(width, momentum=momentum)

        self.conv0p1s1, self.bn0 = conv(in_channels, init, stem, 1), norm(init)
        width, skips, strides = init, [init], (1, 2, 4, 8)
        for level in range(4):
            name, s = level + 1, strides[level]
            setattr(self, f"conv{name}p{s}s2", conv(width, width, step, step))
            setattr(self, f"bn{name}", norm(width))
            setattr(self, f"block{name}", stage(width, planes[level], layers[level]))
            width = planes[level]
            skips.append(width)
        skips.pop()
        for level in range(4, 8):
            name, s = level, 1 << (8 - level)
            up = conv(width, planes[level], step, step, "MinkowskiConvolutionTranspose")
            setattr(self, f"convtr{name}p{s}s2", up)
            setattr(self, f"bntr{name}", norm(planes[level]))
            joined = planes[level] + skips.pop()
            setattr(self, f"block{level + 1}", stage(joined, planes[level], layers[level]))
            width = planes[level]
        self.final = conv(width, out_channels, 1, 1, bias=True)
        self.relu = ME.MinkowskiReLU(inplace=True)

    def forward(self, x):
        out = self.relu(self.bn0(self.conv0p1s1(x)))
        skips = [out]
        for name, s in ((1, 1), (2, 2), (3, 4), (4, 8)):
            out = self.relu(getattr(self, f"bn{name}")(getattr(self, f"conv{name}p{s}s2")(out)))
            out = getattr(self, f"block{name}")(out)
            skips.append(out)
        skips.pop()
        found = [out]
        for level, s in ((4, 16), (5, 8), (6, 4), (7, 2)):
            out = getattr(self, f"convtr{level}p{s}s2")(out)
            out = self.relu(getattr(self, f"bntr{level}")(out))
            out = getattr(self, f"block{level + 1}")(self.ME.cat(out, skips.pop()))
            found.append(out)
        out = self.final(out)
        return (out, found) if self.levels else out


def mask_decoder_levels(ME, x, coordinates, steps=4):
    """Mask3D: raw positions as features on the finest map, averaged down the levels."""
    pool = ME.MinkowskiAvgPooling(kernel_size=2, stride=2, dimension=3)
    position = ME.SparseTensor(
        features=coordinates,
        coordinate_map_key=x.coordinate_map_key,
        coordinate_manager=x.coordinate_manager,
    )
    found = [position]
    for _ in range(steps):
        position = pool(position)
        found.append(position)
    return found


class ResUNetBN2C(nn.Module):
    """FCGF: k3 s2 encoder, k3 s2 transposed decoder, row-normalised features."""

    def __init__(
        self, ME, in_channels=1, out_channels=32, widths=(32, 64, 128, 256),
        up_widths=(64, 64, 64, 128), conv1_kernel_size=7, dimension=3,
    ):  # fmt: skip
        super().__init__()
        self.ME = ME

        def conv(i, o, k, s, kind="MinkowskiConvolution", bias=False):
            return getattr(ME, kind)(
                in_channels=i, out_channels=o, kernel_size=k, stride=s, dilation=1, bias=bias,
                dimension=dimension,
            )  # fmt: skip

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
