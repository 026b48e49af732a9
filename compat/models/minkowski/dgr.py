"""Deep Global Registration: inliers among pairs of points, a ResUNetBN2C in six dimensions.

Source: layer stack S24 of the usage notes with D = 6.
"""

from __future__ import annotations

import MinkowskiEngine as ME
import torch

from .fcgf import ResUNetBN2C


class InlierNet(ResUNetBN2C):
    """channels, tr_channels: other widths of encoder and decoder than the published ones."""

    def __init__(self, conv1_kernel_size=3, channels=None, tr_channels=None):
        if channels is not None:
            self.CHANNELS, self.TR_CHANNELS = tuple(channels), tuple(tr_channels)
        super().__init__(
            in_channels=1,
            out_channels=1,
            bn_momentum=0.05,
            normalize_feature=False,
            conv1_kernel_size=conv1_kernel_size,
            D=6,
        )


def build(**options):
    return InlierNet(**options)


def batch(scene, device, dtype):
    """Coordinates of both partners side by side, a feature of one per pair."""
    features = torch.ones(len(scene.coords), 1).to(device, dtype)
    return (ME.SparseTensor(features, coordinates=scene.coords.to(device)),)
