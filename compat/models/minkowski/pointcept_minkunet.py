"""Pointcept's MinkUNet34C: points in, points out, through a TensorField.

Source: layer stack S14 of the usage notes.
"""

from __future__ import annotations

import MinkowskiEngine as ME
import torch

from .minkunet import LAYERS, MinkUNetBase


def offset2batch(offset):
    """Batch index per point from the cumulated numbers of points."""
    counts = torch.diff(offset, prepend=offset.new_zeros(1))
    return torch.arange(len(offset), device=offset.device).repeat_interleave(counts)


class MinkUNet34C(MinkUNetBase):
    BLOCK, LAYERS = LAYERS["34"]
    PLANES = (32, 64, 128, 256, 256, 128, 96, 96)

    def forward(self, data_dict):
        coord = data_dict["grid_coord"]
        feat = data_dict["feat"]
        index = offset2batch(data_dict["offset"])
        in_field = ME.TensorField(
            feat,
            coordinates=torch.cat([index.unsqueeze(-1).int(), coord.int()], dim=1),
            quantization_mode=ME.SparseTensorQuantizationMode.UNWEIGHTED_AVERAGE,
            minkowski_algorithm=ME.MinkowskiAlgorithm.SPEED_OPTIMIZED,
            device=feat.device,
        )
        out = super().forward(in_field.sparse())
        return out.slice(in_field).F


def build(in_channels=6, out_channels=20):
    return MinkUNet34C(in_channels, out_channels)


def batch(scene, device, dtype):
    """Pointcept's dictionary: grid_coord, feat, offset."""
    counts = torch.bincount(scene.coords[:, 0].long(), minlength=scene.batch_size)
    return (
        {
            "grid_coord": scene.coords[:, 1:].long().to(device),
            "feat": scene.features.to(device, dtype),
            "offset": counts.cumsum(0).to(device),
        },
    )
