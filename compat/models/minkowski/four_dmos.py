"""4DMOS: CustomMinkUNet14 over space and time (D = 4), float points in, labels per point out.

Source: layer stack S29a of the usage notes.
"""

from __future__ import annotations

import MinkowskiEngine as ME
import torch
from torch import nn

from .minkunet import LAYERS, MinkUNetBase


class CustomMinkUNet14(MinkUNetBase):
    """Strides and kernels leave the time axis alone, except in the residual blocks."""

    BLOCK, LAYERS = LAYERS["14"]
    PLANES = (8, 16, 32, 64, 64, 32, 16, 8)
    INIT_DIM = 8
    STEM = (5, 5, 5, 1)
    STEP = (2, 2, 2, 1)


class MOSModel(nn.Module):
    """Classes: 0 unlabeled, 1 static, 2 moving."""

    def __init__(self, voxel_size=0.1, n_classes=3):
        super().__init__()
        self.register_buffer("quantization", torch.tensor([*[voxel_size] * 3, 1.0]), persistent=False)
        self.MinkUNet = CustomMinkUNet14(in_channels=1, out_channels=n_classes, D=4)
        self.ignore_index = 0

    def forward(self, past_point_clouds):
        """past_point_clouds: per batch item float [N, 4] of x, y, z, t."""
        quantization = self.quantization.type_as(past_point_clouds[0])
        clouds = [torch.div(cloud, quantization) for cloud in past_point_clouds]
        weights = self.MinkUNet.final.kernel
        features = [0.5 * torch.ones(len(cloud), 1).type_as(weights) for cloud in clouds]
        coords, features = ME.utils.sparse_collate(clouds, features, dtype=clouds[0].dtype)
        tensor_field = ME.TensorField(features=features, coordinates=coords.to(features.device))
        sparse_tensor = tensor_field.sparse()
        predicted = self.MinkUNet(sparse_tensor)
        out = predicted.slice(tensor_field)
        out.coordinates[:, 1:] = torch.mul(out.coordinates[:, 1:], quantization)
        if not self.training:
            out.features[:, self.ignore_index] = -float("inf")
        return out


def build(**options):
    return MOSModel(**options)


def batch(scene, device, dtype):
    """One list of point clouds; positions are fp32, whatever the weights are."""
    points = torch.cat([scene.points[:, :3], scene.coords[:, 4:].float()], dim=1)
    points = points.to(device)
    index = scene.coords[:, 0].to(device)
    return ([points[index == item] for item in range(scene.batch_size)],)


def outputs(result):
    """Logits while training, probabilities of the known classes afterwards."""
    logits = result.features
    return [logits.softmax(dim=1) if torch.isneginf(logits).any() else logits]
