"""PointGroup, written for spconv 1.x: names at the top level, features assigned."""

from __future__ import annotations

from typing import Any

import spconv

if not hasattr(spconv, "SubMConv3d"):  # 2.x keeps the same names one level down
    import spconv.pytorch as spconv
import torch
from torch import nn

from .blocks import PreActBlock, UBlock
from .softgroup import NORM, SoftGroup, batch

__all__ = ["batch", "build"]


class ResidualBlock(PreActBlock):
    """Pre-activation block that adds its skip into the features in place."""

    def forward(self, input: Any) -> Any:
        identity = spconv.SparseConvTensor(input.features, input.indices, input.spatial_shape, input.batch_size)
        output = self.conv_branch(input)
        output.features += self.i_branch(identity).features
        return output


class PointGroup(SoftGroup):
    """The same graph, of width 16, with a score per cluster from its strongest voxel."""

    def __init__(self, input_c: int, m: int, classes: int):
        nn.Module.__init__(self)
        self.input_conv = spconv.SparseSequential(
            spconv.SubMConv3d(input_c, m, kernel_size=3, padding=1, bias=False, indice_key="subm1")
        )
        self.unet = UBlock([m * (i + 1) for i in range(7)], NORM, 2, ResidualBlock, level=1)
        self.output_layer = spconv.SparseSequential(NORM(m), nn.ReLU())
        self.linear = nn.Linear(m, classes)
        self.offset = nn.Sequential(nn.Linear(m, m, bias=True), NORM(m), nn.ReLU())
        self.offset_linear = nn.Linear(m, 3, bias=True)
        self.score_unet = UBlock([m, 2 * m], NORM, 2, ResidualBlock, level=1)
        self.score_outputlayer = spconv.SparseSequential(NORM(m), nn.ReLU())
        self.score_linear = nn.Linear(m, 1)

    def forward(
        self, feats: torch.Tensor, coords: torch.Tensor, spatial_shape: Any, batch_size: int, clusters: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        x = spconv.SparseConvTensor(feats, coords, spatial_shape, batch_size)
        output = self.input_conv(x)
        output = self.unet(output)
        output.features = torch.cat([output.features], dim=1)
        output = self.output_layer(output)
        features = output.features
        rows, sites, count = self.clusters_voxelization(coords, clusters)
        score = spconv.SparseConvTensor(features[rows], sites, [20] * 3, count)
        score = self.score_outputlayer(self.score_unet(score))
        index = score.indices[:, :1].long().expand_as(score.features)
        empty = score.features.new_zeros(count, score.features.shape[1])
        best = empty.scatter_reduce(0, index, score.features, "amax", include_self=False)
        return {
            "semantic_scores": self.linear(features),
            "pt_offsets": self.offset_linear(self.offset(features)),
            "proposal_scores": self.score_linear(best),
        }


def build(input_c: int = 6, m: int = 16, classes: int = 20) -> nn.Module:
    return PointGroup(input_c, m, classes)
