"""From points to voxels and back with the hash helpers of torchsparse 1.4.

The functions of this name that SPVCNN users (mmdetection3d, Pointcept, 2DPASS, NeuralRecon) carry
along. Coordinates are [x, y, z, batch]; what was found is kept on the points per tensor stride.
"""

from __future__ import annotations

import torch
import torchsparse.nn.functional as F
from torchsparse import PointTensor, SparseTensor
from torchsparse.nn.utils import get_kernel_offsets


def initial_voxelize(z, init_res=1, after_res=1):
    """Mean features of the points per voxel; z.C becomes positions in units of `after_res`."""
    scaled = torch.cat([z.C[:, :3] * init_res / after_res, z.C[:, -1:]], dim=1)
    cells = torch.floor(scaled)
    pc_hash = F.sphash(cells.int())
    sparse_hash = torch.unique(pc_hash)
    idx_query = F.sphashquery(pc_hash, sparse_hash)
    counts = F.spcount(idx_query.int(), len(sparse_hash))
    coords = torch.round(F.spvoxelize(cells, idx_query, counts)).int()
    feats = F.spvoxelize(z.F, idx_query, counts)
    x = SparseTensor(feats, coords, 1)
    x.cmaps.setdefault(x.stride, x.coords)
    z.additional_features["idx_query"][1] = idx_query
    z.additional_features["counts"][1] = counts
    z.C = scaled
    return x


def _cells(z, stride):
    xyz = torch.floor(z.C[:, :3] / stride).int() * stride
    return torch.cat([xyz, z.C[:, -1].int().view(-1, 1)], dim=1)


def point_to_voxel(x, z):
    """Mean features of the points in each voxel of x."""
    features = z.additional_features
    if features is None or features["idx_query"].get(x.s) is None:
        idx_query = F.sphashquery(F.sphash(_cells(z, x.s[0])), F.sphash(x.C))
        counts = F.spcount(idx_query.int(), x.C.shape[0])
        features["idx_query"][x.s] = idx_query
        features["counts"][x.s] = counts
    idx_query, counts = features["idx_query"][x.s], features["counts"][x.s]
    made = SparseTensor(F.spvoxelize(z.F, idx_query, counts), x.C, x.s)
    made.cmaps = x.cmaps
    made.kmaps = x.kmaps
    return made


def voxel_to_point(x, z, nearest=False):
    """Trilinear interpolation of x at the points; `nearest`: the voxel each point lies in."""
    if z.idx_query is None or z.weights is None or z.idx_query.get(x.s) is None:
        offsets = get_kernel_offsets(2, x.s, 1, device=z.F.device)
        old_hash = F.sphash(_cells(z, x.s[0]), offsets)
        idx_query = F.sphashquery(old_hash, F.sphash(x.C.to(z.F.device)))
        weights = F.calc_ti_weights(z.C, idx_query, scale=x.s[0]).transpose(0, 1).contiguous()
        idx_query = idx_query.transpose(0, 1).contiguous()
        if nearest:
            weights[:, 1:] = 0.0
            idx_query[:, 1:] = -1
        z.idx_query[x.s] = idx_query
        z.weights[x.s] = weights
    feats = F.spdevoxelize(x.F, z.idx_query[x.s], z.weights[x.s])
    made = PointTensor(feats, z.C, idx_query=z.idx_query, weights=z.weights)
    made.additional_features = z.additional_features
    return made
