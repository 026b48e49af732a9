"""FCAF3D: MinkResNet34, generative neck, pruning by the scores of the coarser level.

Source: layer stack S28 of the usage notes.
"""

from __future__ import annotations

import math

import MinkowskiEngine as ME
import torch
from MinkowskiEngine.modules.resnet_block import BasicBlock
from torch import nn


class MinkResNet(nn.Module):
    """Feature maps at strides 8, 16, 32, 64."""

    def __init__(self, in_channels=3, depths=(3, 4, 6, 3), width=64, pool=True):
        super().__init__()
        self.inplanes, self.width, self.pool = width, width, pool
        self.conv1 = ME.MinkowskiConvolution(in_channels, width, kernel_size=3, stride=2, dimension=3)
        self.norm1 = ME.MinkowskiInstanceNorm(width)
        self.relu = ME.MinkowskiReLU(inplace=True)
        if pool:
            self.maxpool = ME.MinkowskiMaxPooling(kernel_size=2, stride=2, dimension=3)
        for index, depth in enumerate(depths):
            setattr(self, f"layer{index + 1}", self._make_layer(width * 2**index, depth, stride=2))
        self.num_stages = len(depths)
        for module in self.modules():
            if isinstance(module, ME.MinkowskiConvolution):
                ME.utils.kaiming_normal_(module.kernel, mode="fan_out", nonlinearity="relu")
            if isinstance(module, ME.MinkowskiBatchNorm):
                nn.init.constant_(module.bn.weight, 1)
                nn.init.constant_(module.bn.bias, 0)

    def _make_layer(self, planes, blocks, stride):
        downsample = nn.Sequential(
            ME.MinkowskiConvolution(self.inplanes, planes, kernel_size=1, stride=stride, dimension=3),
            ME.MinkowskiBatchNorm(planes),
        )
        layers = [BasicBlock(self.inplanes, planes, stride, downsample=downsample, dimension=3)]
        self.inplanes = planes
        layers += [BasicBlock(planes, planes, dimension=3) for _ in range(1, blocks)]
        return nn.Sequential(*layers)

    def forward(self, x):
        x = self.relu(self.norm1(self.conv1(x)))
        if self.pool:
            x = self.maxpool(x)
        outs = []
        for index in range(self.num_stages):
            x = getattr(self, f"layer{index + 1}")(x)
            outs.append(x)
        return outs


class Scale(nn.Module):
    """mmcv's learnable factor."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, x):
        return x * self.scale


class FCAF3DHead(nn.Module):
    def __init__(
        self,
        num_classes,
        in_channels=(64, 128, 256, 512),
        out_channels=128,
        num_reg_outs=6,
        voxel_size=0.01,
        pts_prune_threshold=100000,
    ):
        super().__init__()
        self.voxel_size, self.pts_prune_threshold = voxel_size, pts_prune_threshold
        self.pruning = ME.MinkowskiPruning()
        for index, width in enumerate(in_channels):
            if index > 0:
                setattr(self, f"up_block_{index}", self._up_block(width, in_channels[index - 1]))
            setattr(self, f"out_block_{index}", self._block(width, out_channels))
        self.conv_center = ME.MinkowskiConvolution(out_channels, 1, kernel_size=1, dimension=3)
        self.conv_reg = ME.MinkowskiConvolution(out_channels, num_reg_outs, kernel_size=1, dimension=3)
        self.conv_cls = ME.MinkowskiConvolution(out_channels, num_classes, kernel_size=1, bias=True, dimension=3)
        self.scales = nn.ModuleList(Scale() for _ in in_channels)
        for layer in (self.conv_center, self.conv_reg, self.conv_cls):
            nn.init.normal_(layer.kernel, std=0.01)
        nn.init.constant_(self.conv_cls.bias, -math.log(0.99 / 0.01))

    @staticmethod
    def _block(in_channels, out_channels):
        return nn.Sequential(
            ME.MinkowskiConvolution(in_channels, out_channels, kernel_size=3, dimension=3),
            ME.MinkowskiBatchNorm(out_channels),
            ME.MinkowskiELU(),
        )

    @classmethod
    def _up_block(cls, in_channels, out_channels):
        return nn.Sequential(
            ME.MinkowskiGenerativeConvolutionTranspose(in_channels, out_channels, kernel_size=2, stride=2, dimension=3),
            ME.MinkowskiBatchNorm(out_channels),
            ME.MinkowskiELU(),
            *cls._block(out_channels, out_channels),
        )

    def _prune(self, x, scores):
        """Keep the rows that score best, per item of the batch."""
        with torch.no_grad():
            coordinates = x.C.double() if scores.dtype == torch.float64 else x.C.float()
            interpolated_scores = scores.features_at_coordinates(coordinates)
            prune_mask = interpolated_scores.new_zeros(len(interpolated_scores), dtype=torch.bool)
            for permutation in x.decomposition_permutations:
                score = interpolated_scores[permutation]
                mask = score.new_zeros(len(score), dtype=torch.bool)
                topk = min(len(score), self.pts_prune_threshold)
                mask[torch.topk(score.squeeze(1), topk, sorted=False).indices] = True
                prune_mask[permutation[mask]] = True
        return self.pruning(x, prune_mask)

    def _forward_single(self, x, scale):
        center_pred = self.conv_center(x).features
        scores = self.conv_cls(x)
        cls_pred = scores.features
        prune_scores = ME.SparseTensor(
            cls_pred.max(dim=1, keepdim=True).values,
            coordinate_map_key=scores.coordinate_map_key,
            coordinate_manager=scores.coordinate_manager,
        )
        reg_final = self.conv_reg(x).features
        bbox_pred = torch.cat([torch.exp(scale(reg_final[:, :6])), reg_final[:, 6:]], dim=1)
        center_preds, bbox_preds, cls_preds = [], [], []
        for permutation in x.decomposition_permutations:
            center_preds.append(center_pred[permutation])
            bbox_preds.append(bbox_pred[permutation])
            cls_preds.append(cls_pred[permutation])
        points = x.decomposed_coordinates
        for index in range(len(points)):
            points[index] = points[index] * self.voxel_size
        return center_preds, bbox_preds, cls_preds, points, prune_scores

    def forward(self, inputs):
        outs, x, prune_score = [], inputs[-1], None
        for index in range(len(inputs) - 1, -1, -1):
            if index < len(inputs) - 1:
                x = getattr(self, f"up_block_{index + 1}")(x)
                x = inputs[index] + x
                x = self._prune(x, prune_score)
            out = getattr(self, f"out_block_{index}")(x)
            *predictions, prune_score = self._forward_single(out, self.scales[index])
            outs.append(predictions)
        return [list(level) for level in zip(*outs[::-1], strict=True)]


class FCAF3D(nn.Module):
    def __init__(self, in_channels=3, num_classes=18, voxel_size=0.01, backbone=None, **head):
        super().__init__()
        self.voxel_size = voxel_size
        self.backbone = MinkResNet(in_channels, **(backbone or {}))
        widths = [self.backbone.width * 2**level for level in range(self.backbone.num_stages)]
        self.head = FCAF3DHead(num_classes, widths, voxel_size=voxel_size, **head)

    def forward(self, points):
        """points: per item float [N, 3 + C], metres and colours.

        Returns centerness, boxes, classes, positions: per level, per item.
        """
        coordinates, features = ME.utils.batch_sparse_collate(
            [(p[:, :3] / self.voxel_size, p[:, 3:]) for p in points], device=points[0].device
        )
        # Half precision knows no positions, so clouds come in fp32 and colours follow the weights.
        features = features.to(self.backbone.conv1.kernel.dtype)
        x = ME.SparseTensor(coordinates=coordinates, features=features)
        return self.head(self.backbone(x))


def build(**options):
    return FCAF3D(**options)


def batch(scene, device, dtype):
    """One list of point clouds with colours."""
    cloud = torch.cat([scene.points, scene.features], dim=1).to(device)
    index = scene.coords[:, 0].to(device)
    return ([cloud[index == item] for item in range(scene.batch_size)],)


def outputs(result):
    """Predictions with the rows of each item in the order of their positions."""
    *predictions, positions = result
    found = []
    for kind in predictions:
        for level, places in zip(kind, positions, strict=True):
            for rows, place in zip(level, places, strict=True):
                order = torch.arange(len(place), device=place.device)
                for column in (2, 1, 0):
                    order = order[torch.argsort(place[order, column], stable=True)]
                found.append(rows[order])
    return found
