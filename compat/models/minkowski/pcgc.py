"""PCGCv2: a codec of point-cloud geometry with multiscale pruning.

Source: layer stack S29b of the usage notes. The entropy model between encoder and decoder has no
sparse layer and is left out.
"""

from __future__ import annotations

import itertools

import MinkowskiEngine as ME
import torch
from torch import nn


def conv(before, width, kernel_size=3, stride=1):
    return ME.MinkowskiConvolution(
        in_channels=before, out_channels=width, kernel_size=kernel_size, stride=stride, bias=True, dimension=3
    )


class InceptionResNet(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv0_0 = conv(channels, channels // 4, 3)
        self.conv0_1 = conv(channels // 4, channels // 2, 3)
        self.conv1_0 = conv(channels, channels // 4, 1)
        self.conv1_1 = conv(channels // 4, channels // 4, 3)
        self.conv1_2 = conv(channels // 4, channels // 2, 1)
        self.relu = ME.MinkowskiReLU(inplace=True)

    def forward(self, x):
        out0 = self.conv0_1(self.relu(self.conv0_0(x)))
        out1 = self.relu(self.conv1_1(self.relu(self.conv1_0(x))))
        return ME.cat(out0, self.conv1_2(out1)) + x


def make_layer(channels, block_layers=3):
    return nn.Sequential(*[InceptionResNet(channels) for _ in range(block_layers)])


class Encoder(nn.Module):
    def __init__(self, channels=(1, 16, 32, 64, 32, 8)):
        super().__init__()
        first, a, b, c, d, last = channels
        self.conv0, self.down0, self.block0 = conv(first, a), conv(a, b, 2, 2), make_layer(b)
        self.conv1, self.down1, self.block1 = conv(b, b), conv(b, c, 2, 2), make_layer(c)
        self.conv2, self.down2, self.block2 = conv(c, c), conv(c, d, 2, 2), make_layer(d)
        self.conv3 = conv(d, last)
        self.relu = ME.MinkowskiReLU(inplace=True)

    def forward(self, x):
        out0 = self.block0(self.relu(self.down0(self.relu(self.conv0(x)))))
        out1 = self.block1(self.relu(self.down1(self.relu(self.conv1(out0)))))
        out2 = self.block2(self.relu(self.down2(self.relu(self.conv2(out1)))))
        return [self.conv3(out2), out1, out0]


def array2vector(array, step):
    """One integer per row of coordinates below `step`."""
    powers = step ** torch.arange(array.shape[1], device=array.device)
    return (array.long() * powers).sum(dim=1)


def isin(data, ground_truth):
    """Rows of integer coordinates that occur in another list."""
    step = max(data.max(), ground_truth.max()) + 1
    return torch.isin(array2vector(data, step), array2vector(ground_truth, step))


def istopk(data, nums, rho=1.0):
    """Rows with the largest values: nums[i] * rho of item i."""
    mask = torch.zeros(len(data), dtype=torch.bool, device=data.device)
    row_indices_per_batch = data._batchwise_row_indices
    for row_indices, num in zip(row_indices_per_batch, nums, strict=True):
        k = min(len(row_indices), int(num * rho))
        indices = torch.topk(data.F[row_indices].squeeze(1), k).indices
        mask[row_indices[indices]] = True
    return mask


class Decoder(nn.Module):
    def __init__(self, channels=(8, 64, 32, 16)):
        super().__init__()
        for level, (before, width) in enumerate(itertools.pairwise(channels)):
            up = ME.MinkowskiGenerativeConvolutionTranspose(
                in_channels=before, out_channels=width, kernel_size=2, stride=2, bias=True, dimension=3
            )
            setattr(self, f"up{level}", up)
            setattr(self, f"conv{level}", conv(width, width))
            setattr(self, f"block{level}", make_layer(width))
            setattr(self, f"conv{level}_cls", conv(width, 1))
        self.levels = len(channels) - 1
        self.relu = ME.MinkowskiReLU(inplace=True)
        self.pruning = ME.MinkowskiPruning()

    def prune_voxel(self, data, data_cls, nums, ground_truth):
        mask = istopk(data_cls, nums)
        if self.training:
            mask = mask + isin(data_cls.C, ground_truth.C)
        return self.pruning(data, mask.to(data.device))

    def forward(self, x, nums_list, ground_truth_list):
        out_cls_list, out = [], x
        for level in range(self.levels):
            out = self.relu(getattr(self, f"up{level}")(out))
            out = self.relu(getattr(self, f"conv{level}")(out))
            out = getattr(self, f"block{level}")(out)
            out_cls = getattr(self, f"conv{level}_cls")(out)
            out = self.prune_voxel(out, out_cls, nums_list[level], ground_truth_list[level])
            out_cls_list.append(out_cls)
        return out_cls_list, out


class PCCModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.decoder = Decoder()

    def forward(self, x):
        y, *ground_truth_list = self.encoder(x)
        ground_truth_list.append(x)
        nums_list = [[len(C) for C in truth.decomposed_coordinates] for truth in ground_truth_list]
        out_cls_list, out = self.decoder(y, nums_list, ground_truth_list)
        return {"out_cls_list": out_cls_list, "out": out, "prior": y}


def build():
    return PCCModel()


def batch(scene, device, dtype):
    """Occupied voxels with a feature of one."""
    features = torch.ones(len(scene.coords), 1).to(device, dtype)
    return (ME.SparseTensor(features=features, coordinates=scene.coords.to(device)),)
