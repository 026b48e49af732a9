"""Squeeze and excitation."""

import MinkowskiEngine as ME
from MinkowskiEngine.modules.resnet_block import BasicBlock, Bottleneck
from torch import nn

__all__ = ["SEBasicBlock", "SEBottleneck", "SELayer"]


class SELayer(nn.Module):
    """Scales the channels of every batch item by a gate computed from their mean."""

    def __init__(self, channel, reduction=16, D=-1):
        super().__init__()
        self.fc = nn.Sequential(
            ME.MinkowskiLinear(channel, channel // reduction),
            ME.MinkowskiReLU(inplace=True),
            ME.MinkowskiLinear(channel // reduction, channel),
            ME.MinkowskiSigmoid(),
        )
        self.pooling = ME.MinkowskiGlobalPooling()
        self.broadcast_mul = ME.MinkowskiBroadcastMultiplication()

    def forward(self, x):
        return self.broadcast_mul(x, self.fc(self.pooling(x)))


class SEBasicBlock(BasicBlock):
    """`BasicBlock` with a gate before the sum."""

    def __init__(self, inplanes, planes, stride=1, dilation=1, downsample=None, reduction=16, D=-1, bn_momentum=0.1):
        super().__init__(inplanes, planes, stride, dilation, downsample, bn_momentum, dimension=D)
        self.se = SELayer(planes, reduction=reduction, D=D)

    def forward(self, x):
        residual = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.se(self.norm2(self.conv2(out)))
        out += residual
        return self.relu(out)


class SEBottleneck(Bottleneck):
    """`Bottleneck` with a gate before the sum."""

    def __init__(self, inplanes, planes, stride=1, dilation=1, downsample=None, D=3, reduction=16, bn_momentum=0.1):
        super().__init__(inplanes, planes, stride, dilation, downsample, bn_momentum, dimension=D)
        self.se = SELayer(planes * self.expansion, reduction=reduction, D=D)

    def forward(self, x):
        residual = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.relu(self.norm2(self.conv2(out)))
        out = self.se(self.norm3(self.conv3(out)))
        out += residual
        return self.relu(out)
