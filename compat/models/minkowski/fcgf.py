"""FCGF's ResUNetBN2C: strided and transposed convolutions of kernel 3, unit-length features.

Source: layer stack S24 of the usage notes.
"""

from __future__ import annotations

import MinkowskiEngine as ME
import MinkowskiEngine.MinkowskiFunctional as MEF
import torch
from torch import nn


def get_norm(norm_type, num_feats, bn_momentum=0.05, D=-1):
    if norm_type == "BN":
        return ME.MinkowskiBatchNorm(num_feats, momentum=bn_momentum)
    if norm_type == "IN":
        return ME.MinkowskiInstanceNorm(num_feats)
    raise ValueError(f"Type {norm_type}, not defined")


class BasicBlockBN(nn.Module):
    NORM_TYPE = "BN"

    def __init__(self, inplanes, planes, stride=1, dilation=1, bn_momentum=0.1, D=3):
        super().__init__()
        self.conv1 = ME.MinkowskiConvolution(inplanes, planes, kernel_size=3, stride=stride, dimension=D)
        self.norm1 = get_norm(self.NORM_TYPE, planes, bn_momentum, D)
        self.conv2 = ME.MinkowskiConvolution(
            planes, planes, kernel_size=3, stride=1, dilation=dilation, bias=False, dimension=D
        )
        self.norm2 = get_norm(self.NORM_TYPE, planes, bn_momentum, D)

    def forward(self, x):
        out = MEF.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += x
        return MEF.relu(out)


class ResUNet2(ME.MinkowskiNetwork):
    NORM_TYPE = "BN"
    CHANNELS: tuple[int, ...] = (32, 64, 128, 256)
    TR_CHANNELS: tuple[int, ...] = (32, 64, 64, 128)

    def __init__(
        self, in_channels=3, out_channels=32, bn_momentum=0.1, normalize_feature=None, conv1_kernel_size=5, D=3
    ):
        super().__init__(D)
        channels, tr = self.CHANNELS, self.TR_CHANNELS
        self.normalize_feature = normalize_feature

        def conv(before, width, kernel_size, stride=1, bias=False):
            return ME.MinkowskiConvolution(
                in_channels=before,
                out_channels=width,
                kernel_size=kernel_size,
                stride=stride,
                dilation=1,
                bias=bias,
                dimension=D,
            )

        def conv_tr(before, width):
            return ME.MinkowskiConvolutionTranspose(
                in_channels=before, out_channels=width, kernel_size=3, stride=2, dilation=1, bias=False, dimension=D
            )

        def norm(width):
            return get_norm(self.NORM_TYPE, width, bn_momentum, D)

        def block(width):
            return BasicBlockBN(width, width, bn_momentum=bn_momentum, D=D)

        self.conv1 = conv(in_channels, channels[0], conv1_kernel_size)
        self.norm1, self.block1 = norm(channels[0]), block(channels[0])
        self.conv2 = conv(channels[0], channels[1], 3, 2)
        self.norm2, self.block2 = norm(channels[1]), block(channels[1])
        self.conv3 = conv(channels[1], channels[2], 3, 2)
        self.norm3, self.block3 = norm(channels[2]), block(channels[2])
        self.conv4 = conv(channels[2], channels[3], 3, 2)
        self.norm4, self.block4 = norm(channels[3]), block(channels[3])

        self.conv4_tr = conv_tr(channels[3], tr[3])
        self.norm4_tr, self.block4_tr = norm(tr[3]), block(tr[3])
        self.conv3_tr = conv_tr(channels[2] + tr[3], tr[2])
        self.norm3_tr, self.block3_tr = norm(tr[2]), block(tr[2])
        self.conv2_tr = conv_tr(channels[1] + tr[2], tr[1])
        self.norm2_tr, self.block2_tr = norm(tr[1]), block(tr[1])
        self.conv1_tr = conv(channels[0] + tr[1], tr[0], 1)
        self.final = conv(tr[0], out_channels, 1, bias=True)

    def forward(self, x):
        out_s1 = self.block1(self.norm1(self.conv1(x)))
        out_s2 = self.block2(self.norm2(self.conv2(MEF.relu(out_s1))))
        out_s4 = self.block3(self.norm3(self.conv3(MEF.relu(out_s2))))
        out_s8 = self.block4(self.norm4(self.conv4(MEF.relu(out_s4))))

        out = MEF.relu(self.block4_tr(self.norm4_tr(self.conv4_tr(MEF.relu(out_s8)))))
        out = self.conv3_tr(ME.cat(out, out_s4))
        out = MEF.relu(self.block3_tr(self.norm3_tr(out)))
        out = self.conv2_tr(ME.cat(out, out_s2))
        out = MEF.relu(self.block2_tr(self.norm2_tr(out)))
        out = self.conv1_tr(ME.cat(out, out_s1))
        out = self.final(MEF.relu(out))
        if not self.normalize_feature:
            return out
        return ME.SparseTensor(
            out.F / torch.norm(out.F, p=2, dim=1, keepdim=True),
            coordinate_map_key=out.coordinate_map_key,
            coordinate_manager=out.coordinate_manager,
        )


class ResUNetBN2C(ResUNet2):
    TR_CHANNELS = (64, 64, 64, 128)


def build(in_channels=1, out_channels=32, conv1_kernel_size=7):
    return ResUNetBN2C(
        in_channels, out_channels, bn_momentum=0.05, normalize_feature=True, conv1_kernel_size=conv1_kernel_size, D=3
    )


def batch(scene, device, dtype):
    """Occupancy features; positions quantised by the library and collated."""
    coords, feats = [], []
    for item in range(scene.batch_size):
        points = scene.points[scene.coords[:, 0] == item] / torch.tensor(scene.voxel_size)
        unique, rows = ME.utils.sparse_quantize(points.floor().int(), return_index=True)
        coords.append(unique.int())
        feats.append(torch.ones(len(rows), 1))
    coordinates, features = ME.utils.sparse_collate(coords, feats)
    features = features.to(device, dtype)
    return (ME.SparseTensor(features, coordinates=coordinates.to(device)),)
