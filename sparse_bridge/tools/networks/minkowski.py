"""MinkUNet in the API of MinkowskiEngine, which is the argument `ME`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn


def basic_block(
    ME: Any,
    inplanes: int,
    planes: int,
    stride: int = 1,
    dimension: int = 3,
    momentum: float = 0.1,
    make: Callable[[int, int, int, int], nn.Module] | None = None,
) -> nn.Module:
    """conv k3, BN, relu, conv k3, BN, plus the input (1x1 conv, BN if widths differ), relu."""
    conv = make or (lambda i, o, k, s: ME.MinkowskiConvolution(i, o, kernel_size=k, stride=s, dimension=dimension))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = conv(inplanes, planes, 3, stride)
            self.norm1 = ME.MinkowskiBatchNorm(planes, momentum=momentum)
            self.conv2 = conv(planes, planes, 3, 1)
            self.norm2 = ME.MinkowskiBatchNorm(planes, momentum=momentum)
            self.relu = ME.MinkowskiReLU(inplace=True)
            self.downsample = None
            if stride != 1 or inplanes != planes:
                self.downsample = nn.Sequential(
                    conv(inplanes, planes, 1, stride), ME.MinkowskiBatchNorm(planes, momentum=momentum)
                )

        def forward(self, x: Any) -> Any:
            residual = x if self.downsample is None else self.downsample(x)
            out = self.relu(self.norm1(self.conv1(x)))
            out = self.norm2(self.conv2(out))
            out += residual
            return self.relu(out)

    return Block()


class MinkUNet(nn.Module):
    """MinkUNet34C by default. 14: layers (1,) * 8.  18: (2,) * 8.  Res16UNet34C: momentum .02 and
    kernels through `KernelGenerator`.  4DMOS: stem (5, 5, 5, 1), steps (2, 2, 2, 1).

    Takes a sparse tensor and returns one of `out_channels` on its coordinates; with `levels` also
    the tensors of the decoder, coarse to fine.
    """

    def __init__(
        self,
        ME: Any,
        in_channels: int = 3,
        out_channels: int = 20,
        dimension: int = 3,
        layers: Sequence[int] = (2, 3, 4, 6, 2, 2, 2, 2),
        planes: Sequence[int] = (32, 64, 128, 256, 256, 128, 96, 96),
        init: int = 32,
        stem: Any = 5,
        step: Any = 2,
        momentum: float = 0.1,
        through_generator: bool = False,
        levels: bool = False,
    ) -> None:
        super().__init__()
        self._cat, self._levels = ME.cat, levels

        def conv(i: int, o: int, k: Any, s: Any, layer: str = "MinkowskiConvolution", bias: bool = False) -> nn.Module:
            if not through_generator:
                return getattr(ME, layer)(i, o, kernel_size=k, stride=s, bias=bias, dimension=dimension)
            generator = ME.KernelGenerator(
                k, s, dilation=1, region_type=ME.RegionType.HYPER_CUBE, axis_types=None, dimension=dimension
            )
            return getattr(ME, layer)(
                in_channels=i,
                out_channels=o,
                kernel_size=k,
                stride=s,
                dilation=1,
                bias=bias,
                kernel_generator=generator,
                dimension=dimension,
            )

        def stage(i: int, o: int, n: int) -> nn.Module:
            blocks = [basic_block(ME, i, o, 1, dimension, momentum, conv)]
            blocks += [basic_block(ME, o, o, 1, dimension, momentum, conv) for _ in range(n - 1)]
            return nn.Sequential(*blocks)

        def norm(width: int) -> nn.Module:
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

    def forward(self, x: Any) -> Any:
        out = self.relu(self.bn0(self.conv0p1s1(x)))
        skips = [out]
        for name, s in ((1, 1), (2, 2), (3, 4), (4, 8)):
            out = self.relu(getattr(self, f"bn{name}")(getattr(self, f"conv{name}p{s}s2")(out)))
            out = getattr(self, f"block{name}")(out)
            skips.append(out)
        skips.pop()
        features = [out]
        for level, s in ((4, 16), (5, 8), (6, 4), (7, 2)):
            out = getattr(self, f"convtr{level}p{s}s2")(out)
            out = self.relu(getattr(self, f"bntr{level}")(out))
            out = getattr(self, f"block{level + 1}")(self._cat(out, skips.pop()))
            features.append(out)
        out = self.final(out)
        return (out, features) if self._levels else out
