"""Stacks of public projects, in their own ways of passing things on: what of them is replayed."""

from __future__ import annotations

import copy
import re
import types

import pytest
import torch
from torch import nn

from sparse_bridge import settings
from sparse_bridge.core import late_maps
from sparse_bridge.core.capture import graph_regions
from tests.clouds import cloud, features
from tests.compat.loading import imported_anew
from tests.core.capture.graph_sizes import graphs_of

from . import apis

pytestmark = pytest.mark.emulated

SHAPE = (29, 16, 16)  # z, y, x


@pytest.fixture
def models(device, rules):
    """What imports a stack of spconv."""
    rules.hold(graphs_of(512, watched=True))
    with apis.standin("spconv"), settings.override(optimize="graphs"), imported_anew("spconv") as load:
        yield load


def voxels(seed, device, shape=SHAPE):
    """Coordinates (batch, z, y, x) of scenes with the same bounds, and features."""
    coords = cloud(shape, 2, share=0.03 + 0.0002 * seed, seed=seed, device=device)
    corners = [[0, 0, 0, 0], [1, *(extent - 1 for extent in shape)]]
    coords = torch.cat([coords.new_tensor(corners), coords]).unique(dim=0)
    return coords, features(len(coords), 4, seed=seed, device=device)


class Detector(nn.Module):
    """OpenPCDet: one dictionary, to which every module adds; a dense part behind."""

    def __init__(self, models):
        super().__init__()
        second = models("second")
        self.vfe = second.MeanVFE()
        self.backbone_3d = second.VoxelBackBone8x(4, SHAPE[::-1] - torch.tensor([0, 0, 1]).numpy())
        self.map_to_bev_module = second.HeightCompression()
        self.backbone_2d = nn.Conv2d(128, 4, 1)

    def forward(self, batch_dict):
        for module in (self.vfe, self.backbone_3d, self.map_to_bev_module):
            batch_dict = module(batch_dict)
        batch_dict["spatial_features_2d"] = self.backbone_2d(batch_dict["spatial_features"])
        return batch_dict


def detector_given(seed, device):
    coords, values = voxels(seed, device)
    points = values.unsqueeze(1).expand(-1, 3, -1).contiguous()
    counts = torch.full((len(coords),), 3, dtype=torch.int32, device=device)
    frames = {"frame_id": [f"{seed}"], "batch_size": 2, "gt_boxes": torch.ones(2, 1 + seed, 7)}
    return ({"voxels": points, "voxel_coords": coords.float(), "voxel_num_points": counts, **frames},)


def detector_found(out, given):
    (batch,) = given
    assert out is batch and {"frame_id", "gt_boxes", "voxel_features"} <= set(batch)
    found = [batch["spatial_features"], batch["spatial_features_2d"]]
    assert batch["encoded_spconv_tensor_stride"] == 8
    return found + [x.features for x in batch["multi_scale_3d_features"].values()]


def encoder(models):
    """mmdetection3d: features, coordinates and batch size in, a dense view and stages out."""
    return models("mmdet3d_encoder").SparseEncoder(
        4,
        list(SHAPE),
        encoder_channels=((8,), (8, 8, 8), (8, 8, 8), (8, 8, 8)),
        base_channels=8,
        output_channels=8,
        return_middle_feats=True,
    )


def encoder_given(seed, device):
    coords, values = voxels(seed, device)
    return values, coords, 2


def encoder_found(out, given):
    return [out[0], *(x.features for x in out[1]), *(x.indices for x in out[1])]


def unet(models):
    """Pointcept: points in a dictionary, in whatever box they lie."""
    return models("spunet").SpUNetBase(4, 5, 8, channels=(8,) * 8, layers=(1,) * 8)


def unet_given(seed, device):
    shape = (20, 16, 16) if seed < 5 else (20, 17, 14 + seed)
    coords, values = voxels(seed, device, shape)
    ends = torch.bincount(coords[:, 0].long(), minlength=2).cumsum(0)
    return (
        {
            "coord": coords[:, 1:] * 0.1,
            "grid_coord": coords[:, 1:].long(),
            "feat": values,
            "offset": ends,
            "name": f"scene{seed}",
        },
    )


class Body(nn.Module):
    """Begins behind a layer whose map it shares."""

    def __init__(self, sp):
        super().__init__()
        self.down = sp.SparseConv3d(8, 8, 2, 2, bias=False, indice_key="down")
        self.deep = sp.SubMConv3d(8, 8, 3, bias=False, indice_key="deep")
        self.up = sp.SparseInverseConv3d(8, 8, 2, bias=False, indice_key="down")
        self.norm = nn.BatchNorm1d(16)
        self.join = sp.SubMConv3d(16, 8, 3, bias=False, indice_key="subm1")

    def forward(self, x):
        y = self.up(self.deep(self.down(x)))
        return self.join(x.replace_feature(self.norm(torch.cat([x.features, y.features], 1))))


class Proposals(nn.Module):
    """SoftGroup, OneFormer3D: a layer, a U-Net, and numbers of the result on the host."""

    def __init__(self, models):
        super().__init__()
        self.sp = models("blocks").spconv
        self.input_conv = self.sp.SubMConv3d(4, 8, 3, bias=False, indice_key="subm1")
        self.unet = Body(self.sp)
        self.last = self.sp.SubMConv3d(8, 4, 3, bias=False, indice_key="subm1")

    def __deepcopy__(self, memo):
        copied = type(self)(lambda _: types.SimpleNamespace(spconv=self.sp))
        copied.load_state_dict(self.state_dict())
        return copied.to(self.last.weight.device).train(self.training)

    def forward(self, features, coords):
        first = self.input_conv(self.sp.SparseConvTensor(features, coords, list(SHAPE), 2))
        x = self.unet(first)
        assert x.find_indice_pair("subm1") is first.find_indice_pair("subm1") is not None
        assert len(set(map(str, late_maps.present(x.indice_dict))) - {"subm1", "down", "deep"}) == 0
        x = self.last(x)
        return x.features, torch.arange(int(x.features.argmax()) + 1)


def proposals_given(seed, device):
    coords, values = voxels(seed, device)
    return values, coords


PROGRAMS = {
    "softgroup": (Proposals, proposals_given, lambda out, given: out, "Body"),
    "openpcdet": (Detector, detector_given, detector_found, "Detector"),
    "mmdet3d": (encoder, encoder_given, encoder_found, "SparseEncoder"),
    "pointcept": (unet, unet_given, lambda out, given: [out], "SpUNetBase"),
}


@pytest.mark.parametrize("case", PROGRAMS)
@pytest.mark.parametrize("trains", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["inference", "training"])
def test_a_whole_program(models, device, case, trains):
    make, given_by, found_in, name = PROGRAMS[case]
    torch.manual_seed(0)
    plain = make(models).to(device).train(trains)
    model = copy.deepcopy(plain)
    for seed in range(12):
        found = []
        for one in (model, plain):
            given = given_by(seed, device)
            mode = "graphs" if one is model else "off"
            with torch.set_grad_enabled(trains), settings.override(optimize=mode):
                found.append(found_in(one(*given), given))
            one.zero_grad(set_to_none=True)
            if trains:
                found[-1][0].square().mean().backward()
        for mine, theirs in zip(*found, strict=True):
            scale = 1 + float(theirs.detach().abs().max())
            torch.testing.assert_close(mine / scale, theirs / scale, rtol=2e-3, atol=1e-3)
    (part,) = [one for one in graph_regions.summary() if one.hits]
    assert (part.name, part.reason) == (name, None)


@torch.no_grad()
def test_what_is_not_replayed_of_trellis(models, device):
    """It looks into the layout of its object, and no block has four layers: the report says so, and all is computed as
    ever."""
    torch.manual_seed(0)
    plain = models("trellis_flow").build(8, 32, 16, 32).to(device).eval()
    model = copy.deepcopy(plain)
    for seed in range(6):
        coords, values = voxels(seed, device, (12, 12, 12))
        given = (torch.cat([values, values], 1), coords, torch.tensor([100.0, 900.0], device=device))
        found = model(*given)
        with settings.override(optimize="off"):
            expected = plain(*given)
        assert type(found) is type(expected) and found.layout == expected.layout
        torch.testing.assert_close(found.feats, expected.feats, rtol=2e-3, atol=1e-3)
    assert not any(one.hits for one in graph_regions.summary())
    (part,) = graph_regions.summary()
    assert part.name == "SLatFlowIO"
    assert re.search(r"takes numbers of a tensor to the host by __iter__ \(trellis_sparse\.py:\d+\)", part.reason)
