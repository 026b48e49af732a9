"""Residual encoders."""

from torch import nn
from torchsparse.backbones.modules import SparseConvBlock, SparseResBlock

__all__ = ["SparseResNet", "SparseResNet21D"]


class SparseResNet(nn.ModuleList):
    """Stages of (blocks, out_channels, kernel_size, stride); returns the output of every stage."""

    def __init__(self, blocks, *, in_channels=4, width_multiplier=1.0):
        super().__init__()
        self.blocks = blocks
        self.in_channels = in_channels
        self.width_multiplier = width_multiplier
        for num_blocks, out_channels, kernel_size, stride in blocks:
            out_channels = int(out_channels * width_multiplier)
            stage = [SparseConvBlock(in_channels, out_channels, kernel_size, stride=stride)]
            stage += [SparseResBlock(out_channels, out_channels, kernel_size) for _ in range(num_blocks - 1)]
            self.append(nn.Sequential(*stage))
            in_channels = out_channels

    def forward(self, x):
        outputs = []
        for stage in self:
            x = stage(x)
            outputs.append(x)
        return outputs


class SparseResNet21D(SparseResNet):
    """Five stages of 16 to 128 channels."""

    def __init__(self, **kwargs):
        super().__init__(
            blocks=[(3, 16, 3, 1), (3, 32, 3, 2), (3, 64, 3, 2), (3, 128, 3, 2), (1, 128, (1, 3, 1), (1, 2, 1))],
            **kwargs,
        )
