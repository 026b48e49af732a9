"""NeuralRecon's fusion of fragments on torchsparse 1.4: SPVCNN of two levels, then a ConvGRU.

Source: the project's description in the usage notes (.04 m, widths 32, 64, 128, 96, 96).
Points are [x, y, z, batch] in metres.
"""

from __future__ import annotations

import torch
import torchsparse
import torchsparse.nn as spnn
from torch import nn
from torchsparse import PointTensor

from .point_voxel import initial_voxelize, point_to_voxel, voxel_to_point
from .spvnas_minkunet import decoder_stage, encoder_stage, initialize_norms


class SPVCNN(nn.Module):
    def __init__(self, in_channels, pres=1, vres=0.04, cr=1.0, dropout=False):
        super().__init__()
        cs = [int(cr * width) for width in (32, 64, 128, 96, 96)]
        self.pres, self.vres = pres, vres
        self.stem = nn.Sequential(
            spnn.Conv3d(in_channels, cs[0], kernel_size=3, stride=1), spnn.BatchNorm(cs[0]), spnn.ReLU(True)
        )
        self.stage1 = encoder_stage(cs[0], cs[1])
        self.stage2 = encoder_stage(cs[1], cs[2])
        self.up1 = decoder_stage(cs[2], cs[1], cs[3])
        self.up2 = decoder_stage(cs[3], cs[0], cs[4])
        self.point_transforms = nn.ModuleList(
            nn.Sequential(nn.Linear(before, width), nn.BatchNorm1d(width), nn.ReLU(True))
            for before, width in ((cs[0], cs[2]), (cs[2], cs[4]))
        )
        initialize_norms(self)
        self.dropout = nn.Dropout(0.3, True) if dropout else nn.Identity()

    def forward(self, z):
        x0 = self.stem(initial_voxelize(z, self.pres, self.vres))
        z0 = voxel_to_point(x0, z, nearest=False)
        x1 = self.stage1(point_to_voxel(x0, z0))
        x2 = self.stage2(x1)
        z1 = voxel_to_point(x2, z0)
        z1.F = z1.F + self.point_transforms[0](z0.F)

        y3 = point_to_voxel(x2, z1)
        y3.F = self.dropout(y3.F)
        y3 = self.up1[1](torchsparse.cat([self.up1[0](y3), x1]))
        y4 = self.up2[1](torchsparse.cat([self.up2[0](y3), x0]))
        z3 = voxel_to_point(y4, z1)
        z3.F = z3.F + self.point_transforms[1](z1.F)
        return z3.F


class SConv3d(nn.Module):
    """A convolution between points and points, with a linear bypass."""

    def __init__(self, inc, outc, pres, vres, ks=3, stride=1, dilation=1):
        super().__init__()
        self.net = spnn.Conv3d(inc, outc, kernel_size=ks, dilation=dilation, stride=stride)
        self.point_transforms = nn.Sequential(nn.Linear(inc, outc))
        self.pres, self.vres = pres, vres

    def forward(self, z):
        x = self.net(initial_voxelize(z, self.pres, self.vres))
        out = voxel_to_point(x, z, nearest=False)
        out.F = out.F + self.point_transforms(z.F)
        return out


class ConvGRU(nn.Module):
    def __init__(self, hidden_dim, input_dim, pres=1, vres=0.04):
        super().__init__()
        self.convz = SConv3d(hidden_dim + input_dim, hidden_dim, pres, vres, 3)
        self.convr = SConv3d(hidden_dim + input_dim, hidden_dim, pres, vres, 3)
        self.convq = SConv3d(hidden_dim + input_dim, hidden_dim, pres, vres, 3)

    def forward(self, h, x):
        """h: hidden state, x: input; PointTensors with the same float coordinates."""
        z = torch.sigmoid(self.convz(PointTensor(torch.cat([h.F, x.F], dim=1), h.C)).F)
        r = torch.sigmoid(self.convr(PointTensor(torch.cat([h.F, x.F], dim=1), h.C)).F)
        x.F = torch.cat([r * h.F, x.F], dim=1)
        q = torch.tanh(self.convq(x).F)
        h.F = (1 - z) * h.F + z * q
        return h.F


class Fusion(nn.Module):
    """One level: features of the fragment, its state merged with that of the global map."""

    def __init__(self, in_channels=81, voxel_size=0.04, cr=1.0):
        super().__init__()
        width = int(cr * 96)
        self.sp_convs = SPVCNN(in_channels, vres=voxel_size, cr=cr, dropout=False)
        self.fusion_net = ConvGRU(hidden_dim=width, input_dim=width, vres=voxel_size)
        self.tsdf_preds = nn.Linear(width, 1)
        self.occ_preds = nn.Linear(width, 1)

    def forward(self, feats, r_coords, hidden):
        current = self.sp_convs(PointTensor(feats, r_coords))
        feats = self.fusion_net(PointTensor(hidden, r_coords), PointTensor(current, r_coords))
        return self.tsdf_preds(feats), self.occ_preds(feats)


def build(**options):
    return Fusion(**options)


def batch(scene, device, dtype, hidden=96):
    """(image features, points in metres, hidden state of an earlier fragment)."""
    points = torch.cat([scene.points, scene.coords[:, :1].float()], dim=1)
    state = torch.tanh(scene.features[:, :1] * torch.linspace(-1, 1, hidden))
    return scene.features.to(device, dtype), points.to(device), state.to(device, dtype)
