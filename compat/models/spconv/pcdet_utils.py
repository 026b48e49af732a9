"""The ground that OpenPCDet's models stand on: imports for either version, blocks, loading."""

from __future__ import annotations

from typing import Any

import numpy as np
import spconv
import torch
from torch import nn

if float(spconv.__version__[2:]) >= 2.2:
    spconv.constants.SPCONV_USE_DIRECT_TABLE = False

try:
    import spconv.pytorch as spconv
except ImportError:
    import spconv as spconv

try:
    from spconv.utils import VoxelGeneratorV2 as VoxelGenerator

    GENERATION = 1
except ImportError:
    try:
        from spconv.utils import VoxelGenerator

        GENERATION = 1
    except ImportError:
        from spconv.utils import Point2VoxelCPU3d as VoxelGenerator

        GENERATION = 2

try:
    import cumm.tensorview as tv
except ImportError:
    tv = None

from .blocks import BatchNorm


class VoxelGeneratorWrapper:
    """Points to voxels, whichever generation of the voxelizer is installed."""

    def __init__(self, size: Any, bounds: Any, channels: int, per_voxel: int, limit: int):
        if GENERATION == 1:
            self._generator = VoxelGenerator(
                voxel_size=size, point_cloud_range=bounds, max_num_points=per_voxel, max_voxels=limit
            )
        else:
            self._generator = VoxelGenerator(
                vsize_xyz=size,
                coors_range_xyz=bounds,
                num_point_features=channels,
                max_num_points_per_voxel=per_voxel,
                max_num_voxels=limit,
            )

    def generate(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if GENERATION == 1:
            made = self._generator.generate(points)
            if isinstance(made, dict):
                return made["voxels"], made["coordinates"], made["num_points_per_voxel"]
            return made
        assert tv is not None, "spconv 2.x needs cumm"
        voxels, coordinates, counts = self._generator.point_to_voxel(tv.from_numpy(points))
        return voxels.numpy(), coordinates.numpy(), counts.numpy()


class MeanVFE(nn.Module):
    """Mean of the points in each voxel."""

    def forward(self, batch_dict: dict[str, Any]) -> dict[str, Any]:
        voxels, counts = batch_dict["voxels"], batch_dict["voxel_num_points"]
        total = voxels.sum(dim=1, keepdim=False)
        divisor = torch.clamp_min(counts.view(-1, 1), min=1.0).type_as(voxels)
        batch_dict["voxel_features"] = (total / divisor).contiguous()
        return batch_dict


class HeightCompression(nn.Module):
    """Dense bird's-eye view with the heights among the channels."""

    def forward(self, batch_dict: dict[str, Any]) -> dict[str, Any]:
        dense = batch_dict["encoded_spconv_tensor"].dense()
        n, c, d, h, w = dense.shape
        batch_dict["spatial_features"] = dense.view(n, c * d, h, w)
        return batch_dict


class Detector3D(nn.Module):
    """The modules of a detector up to where its dense part begins, run one after another."""

    def __init__(self, **modules: nn.Module):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, batch_dict: dict[str, Any]) -> dict[str, Any]:
        batch_dict = dict(batch_dict)
        for module in self.children():
            batch_dict = module(batch_dict)
        return batch_dict

    def load_from_disk(self, stored: dict[str, torch.Tensor], strict: bool = True) -> list[str]:
        """Load weights of any spconv version by their shapes; the keys that were used.

        Where shapes differ the last two axes are exchanged, else the last axis moves first.
        """
        own, keys, update = self.state_dict(), find_all_spconv_keys(self), {}
        for key, value in stored.items():
            if key in keys and key in own and own[key].shape != value.shape:
                native = value.transpose(-1, -2)
                if own[key].shape == native.shape:
                    value = native.contiguous()
                else:
                    assert value.dim() == 5, "only for spconv 3-d layers"
                    implicit = value.permute(4, 0, 1, 2, 3)
                    if own[key].shape == implicit.shape:
                        value = implicit.contiguous()
            if key in own and own[key].shape == value.shape:
                update[key] = value
        if strict:
            self.load_state_dict(update)
        else:
            own.update(update)
            self.load_state_dict(own)
        return sorted(update)


def find_all_spconv_keys(model: nn.Module, prefix: str = "") -> set[str]:
    """Keys of the weights of all sparse convolutions of a model."""
    found: set[str] = set()
    for name, child in model.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(child, spconv.conv.SparseConvolution):
            found.add(f"{path}.weight")
        found.update(find_all_spconv_keys(child, prefix=path))
    return found


def post_act_block(
    in_channels: int,
    out_channels: int,
    kernel_size: Any,
    indice_key: str,
    stride: Any = 1,
    padding: Any = 0,
    conv_type: str = "subm",
    norm_fn: Any = BatchNorm,
) -> Any:
    """Convolution without bias, norm, ReLU."""
    if conv_type == "subm":
        conv = spconv.SubMConv3d(in_channels, out_channels, kernel_size, bias=False, indice_key=indice_key)
    elif conv_type == "spconv":
        conv = spconv.SparseConv3d(
            in_channels, out_channels, kernel_size, stride=stride, padding=padding, bias=False, indice_key=indice_key
        )
    elif conv_type == "inverseconv":
        conv = spconv.SparseInverseConv3d(in_channels, out_channels, kernel_size, indice_key=indice_key, bias=False)
    else:
        raise NotImplementedError(conv_type)
    return spconv.SparseSequential(conv, norm_fn(out_channels), nn.ReLU())


def voxel_batch(scene: Any, device: Any, dtype: torch.dtype) -> dict[str, Any]:
    """What OpenPCDet's loader collates: voxels, their points and coordinates [b, z, y, x]."""
    points = torch.cat([scene.points, scene.features[:, 3:]], dim=1)
    high = (np.array(scene.grid) * np.array(scene.voxel_size)).tolist()
    generator = VoxelGeneratorWrapper(list(scene.voxel_size), [0.0, 0.0, 0.0, *high], points.shape[1], 5, 200_000)
    voxels, coordinates, counts = [], [], []
    for item in range(scene.batch_size):
        made = generator.generate(points[scene.coords[:, 0] == item].numpy())
        voxels.append(made[0].copy())
        coordinates.append(np.pad(made[1], ((0, 0), (1, 0)), constant_values=item))
        counts.append(made[2].copy())
    return {
        "voxels": torch.from_numpy(np.concatenate(voxels)).to(device, dtype),
        "voxel_coords": torch.from_numpy(np.concatenate(coordinates)).float().to(device),
        "voxel_num_points": torch.from_numpy(np.concatenate(counts)).to(device),
        "batch_size": scene.batch_size,
    }
