"""mmdetection3d's SPVCNN on torchsparse 1.4: MinkUNet with a branch of points.

Source: layer stack S11 of the usage notes.
"""

from __future__ import annotations

import itertools

import torchsparse
from torch import nn
from torchsparse.tensor import PointTensor, SparseTensor

from .mmdet3d_minkunet import MinkUNetBackbone, Segmentor
from .mmdet3d_minkunet import batch as batch
from .point_voxel import initial_voxelize, point_to_voxel, voxel_to_point


class SPVCNNBackbone(MinkUNetBackbone):
    def __init__(
        self,
        in_channels=4,
        base_channels=32,
        encoder_channels=(32, 64, 128, 256),
        decoder_channels=(256, 128, 96, 96),
        drop_ratio=0.3,
        **blocks,
    ):
        super().__init__(in_channels, base_channels, encoder_channels, decoder_channels=decoder_channels, **blocks)
        widths = [base_channels, encoder_channels[-1], decoder_channels[1], decoder_channels[3]]
        self.point_transforms = nn.ModuleList(
            nn.Sequential(nn.Linear(before, width), nn.BatchNorm1d(width), nn.ReLU(True))
            for before, width in itertools.pairwise(widths)
        )
        self.dropout = nn.Dropout(drop_ratio, True)

    def _to_points(self, voxels, points, index):
        fused = voxel_to_point(voxels, points)
        fused.F = fused.F + self.point_transforms[index](points.F)
        return fused

    def _decode(self, voxels, points, laterals, indices):
        voxels = point_to_voxel(voxels, points)
        voxels.F = self.dropout(voxels.F)
        for index in indices:
            voxels = self.decoder[index][0](voxels)
            voxels = torchsparse.cat((voxels, laterals[index]))
            voxels = self.decoder[index][1](voxels)
        return voxels

    def forward(self, voxel_features, coors):
        voxels = SparseTensor(voxel_features, coors)
        points = PointTensor(voxels.F, voxels.C.float())
        voxels = self.conv_input(initial_voxelize(points))
        points = voxel_to_point(voxels, points)
        voxels = point_to_voxel(voxels, points)
        laterals = [voxels]
        for encoder_layer in self.encoder:
            voxels = encoder_layer(voxels)
            laterals.append(voxels)
        laterals = laterals[:-1][::-1]

        points = self._to_points(voxels, points, 0)
        voxels = self._decode(voxels, points, laterals, (0, 1))
        points = self._to_points(voxels, points, 1)
        voxels = self._decode(voxels, points, laterals, (2, 3))
        return self._to_points(voxels, points, 2).F


def build(in_channels=4, num_classes=19, **widths):
    backbone = SPVCNNBackbone(in_channels, **widths)
    return Segmentor(backbone, widths.get("decoder_channels", (96,))[-1], num_classes)
