"""SparsePCGC: occupancy of the eight children of every voxel, one child after the other.

Source: the project's description in the usage notes: `expand_coordinates=True`, max pooling,
tensors rebuilt from sorted coordinates. Probabilities go to an arithmetic coder, left out here.
"""

from __future__ import annotations

import MinkowskiEngine as ME
import torch
from torch import nn

from .pcgc import InceptionResNet, array2vector, conv, isin


def sort_sparse_tensor(x):
    """Encoder and decoder must see one order of rows."""
    indices = torch.argsort(array2vector(x.C.cpu(), int(x.C.max()) + 1)).to(x.device)
    return ME.SparseTensor(
        features=x.F[indices], coordinates=x.C[indices], tensor_stride=x.tensor_stride, device=x.device
    )


class SOPA(nn.Module):
    """Sparse occupancy probability approximation: one scale, eight stages."""

    def __init__(self, channels=32, kernel_size=3, block_layers=3, stages=8):
        super().__init__()
        self.stages = stages
        self.conv0 = conv(1, channels, kernel_size)
        self.block0 = nn.Sequential(*[InceptionResNet(channels) for _ in range(block_layers)])
        self.upscale = ME.MinkowskiConvolutionTranspose(
            in_channels=channels,
            out_channels=channels,
            kernel_size=2,
            stride=2,
            bias=True,
            expand_coordinates=True,
            dimension=3,
        )
        self.block1 = nn.Sequential(*[InceptionResNet(channels) for _ in range(block_layers)])
        self.stage_convs = nn.ModuleList(conv(channels + 1, channels, 3) for _ in range(stages))
        self.classifiers = nn.ModuleList(
            nn.Sequential(conv(channels, channels), ME.MinkowskiReLU(inplace=True), conv(channels, 1))
            for _ in range(stages)
        )
        self.relu = ME.MinkowskiReLU(inplace=True)

    def forward(self, x_low, ground_truth):
        """(features, one logit, whether it is occupied) per child."""
        out = self.block0(self.relu(self.conv0(x_low)))
        out = self.block1(self.relu(self.upscale(out)))
        occupied = isin(out.C, ground_truth.C)
        step = out.tensor_stride[0]
        corner = out.C[:, 1:] // step % 2 * torch.tensor([4, 2, 1], device=out.device)
        stage_of = corner.sum(dim=1) % self.stages
        logits = out.F.new_zeros(len(out))
        for stage in range(self.stages):
            known = (occupied & (stage_of < stage)).to(out.F.dtype).unsqueeze(1)
            context = ME.SparseTensor(
                torch.cat([out.F, known], dim=1),
                coordinate_map_key=out.coordinate_map_key,
                coordinate_manager=out.coordinate_manager,
            )
            found = self.classifiers[stage](self.relu(self.stage_convs[stage](context)))
            logits = torch.where(stage_of == stage, found.F.squeeze(1), logits)
        logits = ME.SparseTensor(
            logits.unsqueeze(1), coordinate_map_key=out.coordinate_map_key, coordinate_manager=out.coordinate_manager
        )
        return out, logits, occupied


class PCCModel(nn.Module):
    def __init__(self, scale=2, **sopa):
        super().__init__()
        self.downscale = ME.MinkowskiMaxPooling(kernel_size=2, stride=2, dimension=3)
        self.sopa = SOPA(**sopa)
        self.pruning = ME.MinkowskiPruning()
        self.scale = scale

    def forward(self, x):
        """Per scale: logits, occupancy, and the voxels that the occupancy leaves."""
        found = []
        for _ in range(self.scale):
            ground_truth = x
            x = sort_sparse_tensor(self.downscale(x))
            out, logits, occupied = self.sopa(x, ground_truth)
            found.append((logits, occupied, self.pruning(out, occupied)))
            x = ME.SparseTensor(features=torch.ones_like(x.F), coordinates=x.C, tensor_stride=x.tensor_stride)
        return found


def build(**options):
    return PCCModel(**options)


def batch(scene, device, dtype):
    """Occupied voxels with a feature of one."""
    features = torch.ones(len(scene.coords), 1).to(device, dtype)
    return (ME.SparseTensor(features=features, coordinates=scene.coords.to(device)),)


def outputs(result):
    return [[logits, pruned] for logits, _, pruned in result]


def loss(result):
    """Bits per occupied child, as binary cross entropy."""
    terms = [
        nn.functional.binary_cross_entropy_with_logits(logits.F.squeeze(1), occupied.to(logits.F.dtype))
        for logits, occupied, _ in result
    ]
    return sum(terms)
