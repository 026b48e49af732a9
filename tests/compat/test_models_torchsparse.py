"""The torchsparse models: published names and shapes, and releases that agree on old weights."""

from __future__ import annotations

import logging
import math
import re

import pytest
import torch

import sparse_bridge
from compat import matrix, scenes

from . import loading

MODELS = {m.module.rpartition(".")[2]: m for m in matrix.load() if m.framework == "torchsparse"}
WIDTHS = (8, 8, 12, 16, 20, 16, 12, 8, 10)

MMDET3D = {
    "backbone.conv_input.0.0.kernel": (27, 4, 32),
    "backbone.conv_input.1.0.kernel": (27, 32, 32),
    "backbone.encoder.0.0.0.kernel": (8, 32, 32),
    "backbone.encoder.1.1.downsample.0.kernel": (32, 64),
    "backbone.encoder.3.2.net.1.0.kernel": (27, 256, 256),
    "backbone.decoder.0.0.0.kernel": (8, 256, 256),
    "backbone.decoder.0.1.0.net.0.0.kernel": (27, 384, 256),
    "backbone.decoder.3.1.0.downsample.0.kernel": (128, 96),
    "decode_head.conv_seg.weight": (19, 96),
}
SPVNAS = {
    "stem.0.kernel": (27, 4, 32),
    "stem.3.kernel": (27, 32, 32),
    "stage1.0.net.0.kernel": (8, 32, 32),
    "stage2.1.downsample.0.kernel": (32, 64),
    "stage4.2.net.3.kernel": (27, 256, 256),
    "up1.0.net.0.kernel": (8, 256, 256),
    "up1.1.0.net.0.kernel": (27, 384, 256),
    "up4.1.0.net.0.kernel": (27, 128, 96),
    "classifier.0.weight": (19, 96),
}
POINTS = {
    "point_transforms.0.0.weight": (256, 32),
    "point_transforms.1.0.weight": (128, 256),
    "point_transforms.2.0.weight": (96, 128),
}
# What the layer stacks say: some entries of the state, and millions of parameters.
FACTS = {
    "mmdet3d_minkunet": (MMDET3D, 21.72),
    "mmdet3d_spvcnn": (MMDET3D | {f"backbone.{k}": v for k, v in POINTS.items()}, 21.78),
    "spvnas_minkunet": (SPVNAS, 21.72),
    "spvnas_spvcnn": (SPVNAS | POINTS, 21.78),
    "direct3d_sdf_decoder": (
        {
            "upsample.0.act_layers.0.conv.kernel": (27, 512, 128),
            "upsample.1.out_layers.0.conv.kernel": (27, 64, 64),
            "upsample.2.out_layers.0.conv.bias": (32,),
        },
        2.64,
    ),
    "neuralrecon": (
        {
            "sp_convs.stage2.1.net.0.kernel": (27, 64, 128),
            "sp_convs.up2.1.0.net.0.kernel": (27, 128, 96),
            "fusion_net.convq.net.kernel": (27, 192, 96),
            "fusion_net.convz.point_transforms.0.weight": (96, 192),
        },
        6.07,
    ),
    "trellis2_vae": (
        {
            "encoder.1.0.conv.conv.kernel": (27, 32, 32),
            "encoder.3.4.conv1.conv.kernel": (27, 128, 32),
            "decoder.0.1.conv1.conv.kernel": (27, 256, 1024),
        },
        22.35,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_names_and_shapes_of_checkpoints(name):
    wanted, millions = FACTS[name]
    model = MODELS[name]
    with loading.models("torchsparse", model.profile) as load:
        found = loading.shapes(load(name).build, **model.options)
    assert {key: found.get(key) for key in wanted} == wanted
    assert loading.count(found) == millions


def box(side=32, items=2, share=0.01, seed=0):
    """A scene whose extents every stride divides: 2.1 drops the last cell of odd ones."""
    generator = torch.Generator().manual_seed(seed)
    sites = (torch.rand(items, side, side, side, generator=generator) < share).nonzero()
    corners = torch.tensor([[item, side - 1, side - 1, side - 1] for item in range(items)])
    coords = torch.cat([sites, corners]).unique(dim=0).int()
    features = torch.randn(len(coords), 4, generator=generator)
    points = coords[:, 1:] + torch.rand(len(coords), 3, generator=generator) * 0.99
    return scenes.Scene(coords, features, points, (side,) * 3, (1.0,) * 3, items)


def run(module, network, scene):
    network = network.double().train()
    return network(*module.batch(scene, torch.device("cpu"), torch.float64))


def spvnas_names(name):
    """SPVNAS's name of a parameter of mmdetection3d."""

    def joined(match):
        return f"{match[1]}.{3 * int(match[2]) + int(match[3])}."

    name = name.removeprefix("backbone.").replace("decode_head.conv_seg.", "classifier.0.")
    name = re.sub(r"(net|conv_input)\.(\d)\.(\d)\.", joined, name).replace("conv_input", "stem")
    name = re.sub(r"^(encoder|decoder)\.(\d)\.0\.", r"\1.\2.0.net.", name)
    for theirs, ours in (("encoder", "stage"), ("decoder", "up")):
        name = re.sub(rf"^{theirs}\.(\d)", lambda m, to=ours: f"{to}{int(m[1]) + 1}", name)
    return name


def test_releases_agree_on_the_weights_of_minkunet():
    """mmdetection3d on 1.4 and SPVNAS on 2.1: other calls, coordinates and names, one network."""
    scene = box()
    torch.manual_seed(0)
    with loading.models("torchsparse", "1.4") as load:
        old = load("mmdet3d_minkunet")
        widths = {"base_channels": 8, "encoder_channels": (8, 12, 16, 20)}
        network = old.build(decoder_channels=(16, 12, 8, 10), **widths)
        want = run(old, network, scene)
    with loading.models("torchsparse", "2.1") as load:
        new = load("spvnas_minkunet")
        other = loading.copy_weights(network, new.build(channels=WIDTHS), spvnas_names)
        (x,) = new.batch(scene, torch.device("cpu"), torch.float64)
        assert torch.equal(x.C, scene.coords) and x.F.dtype == torch.float64
        got = run(new, other, scene)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_releases_agree_on_the_weights_of_spvcnn():
    """Hash helpers and PointTensor on 1.4 against the hash table and `_caches` of 2.1."""
    scene = box(seed=1)
    torch.manual_seed(0)
    results = []
    for profile, name in (("1.4", "mmdet3d_spvcnn"), ("2.1", "spvnas_spvcnn")):
        with loading.models("torchsparse", profile) as load:
            module = load(name)
            if profile == "1.4":
                widths = {"base_channels": 8, "encoder_channels": (8, 12, 16, 20)}
                network = first = module.build(decoder_channels=(16, 12, 8, 10), drop_ratio=0.0, **widths)
            else:
                network = module.build(channels=WIDTHS, pres=1, vres=1)
                loading.copy_weights(first, network, spvnas_names)
                network.dropout.p = 0.0
            y = run(module, network, scene)
            y.square().mean().backward()
            kernel = dict(network.named_parameters())[
                "backbone.conv_input.0.0.kernel" if profile == "1.4" else "stem.0.kernel"
            ]
            results.append((y.detach(), kernel.grad))
    # Positions are fp32 in both, scaled in another order.
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)


def test_an_old_model_decides_the_profile(caplog):
    """Positional arguments of 1.4 in a process that names no profile."""
    with caplog.at_level(logging.WARNING, "sparse_bridge"), loading.models("torchsparse") as load:
        loading.shapes(load("mmdet3d_minkunet").build)
        assert sparse_bridge.status()["torchsparse"].version == "1.4.0"
    assert "profile 1.4 was detected" in caplog.text


def test_registries_see_one_class_per_name():
    with loading.models("torchsparse", "1.4") as load:
        module = load("mmdet3d_minkunet")
        with pytest.raises(KeyError, match="already registered"):
            module.register_module(module.Conv3d, "TorchSparseConv3d")
        with sparse_bridge.enable("torchsparse"):
            import torchsparse.nn

            assert torchsparse.nn.Conv3d is module.MODELS["TorchSparseConv3d"]


def test_sdf_decoder_splits_every_voxel_three_times():
    scene = scenes.make("vae1024", "tiny", 16)
    with loading.models("torchsparse", "2.1") as load:
        module = load("direct3d_sdf_decoder")
        network = module.build(model_channels=64)
        latents, coords = module.batch(scene, torch.device("cpu"), torch.float32)
        result = network(latents, coords)
        assert len(result.feats) == 512 * len(coords)
        parents = result.coords.clone()
        parents[:, 1:] //= 8
        assert torch.equal(parents[::512], coords)
        assert len(result.coords.unique(dim=0)) == len(result.coords)
        result.feats.square().mean().backward()
        assert all(p.grad is not None and p.grad.any() for p in network.parameters())


def test_fusion_keeps_the_points():
    """Two voxels wide: of the points in one voxel each keeps its own value."""
    scene = scenes.make("scannet02", "tiny", 12)
    with loading.models("torchsparse", "1.4") as load:
        module = load("neuralrecon")
        network = module.build(in_channels=12, cr=1 / 6)
        feats, points, hidden = module.batch(scene, torch.device("cpu"), torch.float32, hidden=16)
        before = points.clone()
        tsdf, occupancy = network.eval()(feats, points, hidden)
        assert torch.equal(points, before)
        assert tsdf.shape == occupancy.shape == (len(points), 1)
        assert len(tsdf.unique()) > len(tsdf) // 2
        (tsdf + occupancy).sum().backward()
        assert math.isfinite(sum(float(p.grad.abs().sum()) for p in network.parameters()))
