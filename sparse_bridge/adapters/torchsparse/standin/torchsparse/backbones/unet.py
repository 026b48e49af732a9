"""Residual U-Nets."""

import torchsparse
from torch import nn
from torchsparse.backbones.modules import SparseConvBlock, SparseConvTransposeBlock, SparseResBlock

__all__ = ["SparseResUNet", "SparseResUNet42"]


class SparseResUNet(nn.Module):
    """stem_channels, encoder_channels (4), decoder_channels (4); returns nine tensors: the stem and
    the encoders from fine to coarse, then the decoders from coarse to fine.
    """

    def __init__(self, stem_channels, encoder_channels, decoder_channels, *, in_channels=4, width_multiplier=1.0):
        super().__init__()
        self.stem_channels = stem_channels
        self.encoder_channels = encoder_channels
        self.decoder_channels = decoder_channels
        self.in_channels = in_channels
        self.width_multiplier = width_multiplier
        widths = [
            int(channels * width_multiplier) for channels in (stem_channels, *encoder_channels, *decoder_channels)
        ]
        self.stem = nn.Sequential(SparseConvBlock(in_channels, widths[0], 3), SparseConvBlock(widths[0], widths[0], 3))
        n_levels = len(encoder_channels)
        self.encoders = nn.ModuleList()
        for level in range(n_levels):
            self.encoders.append(
                nn.Sequential(
                    SparseConvBlock(widths[level], widths[level], 2, stride=2),
                    SparseResBlock(widths[level], widths[level + 1], 3),
                    SparseResBlock(widths[level + 1], widths[level + 1], 3),
                )
            )
        self.decoders = nn.ModuleList()
        for level in range(n_levels):
            wide, out = widths[n_levels + level], widths[n_levels + level + 1]
            skip = widths[n_levels - 1 - level]
            self.decoders.append(
                nn.ModuleDict(
                    {
                        "upsample": SparseConvTransposeBlock(wide, out, 2, stride=2),
                        "fuse": nn.Sequential(SparseResBlock(out + skip, out, 3), SparseResBlock(out, out, 3)),
                    }
                )
            )

    def forward(self, x):
        encoded = [self.stem(x)]
        for encoder in self.encoders:
            encoded.append(encoder(encoded[-1]))
        decoded, x = [], encoded[-1]
        for level, decoder in enumerate(self.decoders):
            x = decoder["upsample"](x)
            x = decoder["fuse"](torchsparse.cat([x, encoded[-2 - level]]))
            decoded.append(x)
        return encoded + decoded


class SparseResUNet42(SparseResUNet):
    """Stem 32; encoders 32, 64, 128, 256; decoders 256, 128, 96, 96."""

    def __init__(self, **kwargs):
        super().__init__(
            stem_channels=32, encoder_channels=[32, 64, 128, 256], decoder_channels=[256, 128, 96, 96], **kwargs
        )
