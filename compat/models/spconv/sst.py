"""FSDv2's virtual-voxel mixer: the sparse U-Net of SST, which also takes over saving."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .blocks import zyx
from .mmdet3d_ops import MODELS, SparseModule
from .mmdet3d_unet import SparseUNet


def _save_to_state_dict(self: Any, destination: Any, prefix: str, keep_vars: bool) -> None:
    """Parameters and buffers under their own names, as torch does it."""
    for name, value in (*self._parameters.items(), *self._buffers.items()):
        if value is not None and name not in self._non_persistent_buffers_set:
            destination[prefix + name] = value if keep_vars else value.detach()


SparseModule._save_to_state_dict = _save_to_state_dict


class SimpleSparseUNet(SparseUNet):
    """Features of every voxel after five levels; no bird's-eye view."""

    def __init__(self, in_channels: int, sparse_shape: Any, **options: Any):
        super().__init__(in_channels, sparse_shape, **options)
        del self.conv_out

    def forward(self, voxel_features: torch.Tensor, coors: torch.Tensor, batch_size: int) -> Any:
        features = self.encode(voxel_features, coors, batch_size)
        x = self.decode(features[1:])
        return {"voxel_feats": x.features, "voxel_coors": x.indices}


MODELS._register_module(SimpleSparseUNet, force=True)


class VirtualVoxelMixer(nn.Module):
    """Voxels widened, mixed, projected."""

    def __init__(self, in_channels: int, sparse_shape: Any):
        super().__init__()
        self.embed = nn.Linear(in_channels, 64)
        self.backbone = MODELS.build(
            {
                "type": "SimpleSparseUNet",
                "in_channels": 64,
                "sparse_shape": list(sparse_shape),
                "base_channels": 64,
                "output_channels": 128,
                "encoder_channels": ((64,), (64, 64, 64), (64, 64, 64), (128, 128, 128), (256, 256, 256)),
                "encoder_paddings": ((1,), (1, 1, 1), (1, 1, 1), ((0, 1, 1), 1, 1), (1, 1, 1)),
                "decoder_channels": ((256, 256, 128), (128, 128, 64), (64, 64, 64), (64, 64, 64), (64, 64, 64)),
                "decoder_paddings": ((1, 1), (1, 0), (1, 0), (0, 0), (0, 1)),
            }
        )
        self.out = nn.Linear(64, 67)

    def forward(self, features: torch.Tensor, coors: torch.Tensor, batch_size: int) -> Any:
        mixed = self.backbone(self.embed(features), coors, batch_size)
        return self.out(mixed["voxel_feats"])


def build(in_channels: int = 10, sparse_shape: Any = (41, 1504, 1504)) -> nn.Module:
    return VirtualVoxelMixer(in_channels, sparse_shape)


def batch(scene: Any, device: Any, dtype: torch.dtype) -> tuple:
    return scene.features.to(device, dtype), zyx(scene, device), scene.batch_size
