"""Residual blocks."""

import MinkowskiEngine as ME
from torch import nn

from sparse_bridge.adapters.minkowski.errors import DimensionError
from sparse_bridge.adapters.minkowski.geometry import is_count

__all__ = ["BasicBlock", "Bottleneck"]


def _check_dimension(dimension):
    if not is_count(dimension):
        raise DimensionError(f"dimension={dimension!r}; expected 1 or more.")


class BasicBlock(nn.Module):
    """k3 conv, norm, relu, k3 conv, norm, plus the (downsampled) input, relu."""

    expansion = 1

    def __init__(self, inplanes, planes, stride=1, dilation=1, downsample=None, bn_momentum=0.1, dimension=-1):
        super().__init__()
        _check_dimension(dimension)
        self.conv1 = ME.MinkowskiConvolution(
            inplanes, planes, kernel_size=3, stride=stride, dilation=dilation, dimension=dimension
        )
        self.norm1 = ME.MinkowskiBatchNorm(planes, momentum=bn_momentum)
        self.conv2 = ME.MinkowskiConvolution(
            planes, planes, kernel_size=3, stride=1, dilation=dilation, dimension=dimension
        )
        self.norm2 = ME.MinkowskiBatchNorm(planes, momentum=bn_momentum)
        self.relu = ME.MinkowskiReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x):
        residual = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += residual
        return self.relu(out)


class Bottleneck(nn.Module):
    """k1, k3 (stride, dilation) and k1 convs to four times the planes, plus the input."""

    expansion = 4

    def __init__(self, inplanes, planes, stride=1, dilation=1, downsample=None, bn_momentum=0.1, dimension=-1):
        super().__init__()
        _check_dimension(dimension)
        out_planes = planes * self.expansion
        self.conv1 = ME.MinkowskiConvolution(inplanes, planes, kernel_size=1, dimension=dimension)
        self.norm1 = ME.MinkowskiBatchNorm(planes, momentum=bn_momentum)
        self.conv2 = ME.MinkowskiConvolution(
            planes, planes, kernel_size=3, stride=stride, dilation=dilation, dimension=dimension
        )
        self.norm2 = ME.MinkowskiBatchNorm(planes, momentum=bn_momentum)
        self.conv3 = ME.MinkowskiConvolution(planes, out_planes, kernel_size=1, dimension=dimension)
        self.norm3 = ME.MinkowskiBatchNorm(out_planes, momentum=bn_momentum)
        self.relu = ME.MinkowskiReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x):
        residual = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.relu(self.norm2(self.conv2(out)))
        out = self.norm3(self.conv3(out))
        out += residual
        return self.relu(out)
