"""Networks written for MinkowskiEngine 0.4 run as they were written, with its profile."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

import sparse_bridge
from compat import scenes
from sparse_bridge.adapters.minkowski.geometry import cube_points, hybrid_points

SMALL = {"planes": (8, 12, 16, 16, 16, 12, 8, 8), "layers": (1,) * 8}
SMALLER = {"planes": (8, 12, 16, 12, 8, 8), "layers": (1,) * 6}


@pytest.fixture(params=["0.4", None], ids=["chosen", "recognised"])
def old(request):
    """The module of networks, imported under the stand-in."""
    with sparse_bridge.enable("minkowski", profile=request.param):
        try:
            yield importlib.import_module("tests.compat.old_minkowski")
        finally:
            importlib.sys.modules.pop("tests.compat.old_minkowski", None)


def tensor(old, D=3, channels=3, dtype=torch.float32):
    data = scenes.make("codec", "small", channels, D)
    return old.ME.SparseTensor(data.features.to(dtype), coords=data.coords)


@pytest.mark.parametrize(
    ("network", "sizes", "D"), [("Res16UNet", SMALL, 3), ("Res16UNet", SMALL, 4), ("ResUNetINBN", SMALLER, 3)]
)
def test_segmentation_networks_train(old, network, sizes, D):
    net = getattr(old, network)(3, 20, D=D, **sizes)
    x = tensor(old, D)
    y = net(x)
    assert y.coords_key == x.coords_key and y.F.shape == (len(x), 20)
    assert old.ME.__version__ == "0.4.3"
    torch.nn.functional.cross_entropy(y.F, torch.arange(len(x)) % 20).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    kernel = net.enc0[0].conv1
    assert kernel.kernel_generator.kernel_volume == 27 + 2 * (D == 4) == len(kernel.kernel)
    assert kernel.region_type_ == old.ME.RegionType.HYBRID
    net.eval()(x)


def test_hybrid_cubes_are_cubes_in_another_order(old):
    """Over three axes a hybrid kernel of cubes computes what a cube does with its rows permuted."""
    hybrid = old.Res16UNet(3, 5, **SMALL).double().eval()
    cube = old.CubeRes16UNet(3, 5, **SMALL).double().eval()
    listed = hybrid_points((3, 3, 3), (old.ME.RegionType.HYPERCUBE,) * 3)
    order = torch.tensor([listed.index(point) for point in cube_points((3, 3, 3))])
    assert order.tolist() != sorted(order.tolist())
    state = {
        name: value[order] if ".conv1." in name or ".conv2." in name else value
        for name, value in hybrid.state_dict().items()
    }
    cube.load_state_dict(state)
    x = tensor(old, dtype=torch.float64)
    torch.testing.assert_close(hybrid(x).F, cube(x).F, rtol=1e-9, atol=1e-9)


def test_published_sizes(old):
    """Kernels and parameters of the checkpoints that the project published."""
    net = old.Res16UNet(3, 20, **old.RES16UNET34C)
    shapes = {name: tuple(p.shape) for name, p in net.named_parameters()}
    assert shapes["conv0.kernel"] == (125, 3, 32) and shapes["down0.kernel"] == (8, 32, 32)
    assert shapes["enc3.5.conv2.kernel"] == (27, 256, 256) and shapes["final.bias"] == (1, 20)
    assert round(sum(p.numel() for p in net.parameters()) / 1e6, 2) == 37.86
    assert "region_type=RegionType.HYBRID, kernel_volume=27" in repr(net.enc0[0].conv1)


def test_features_of_pairs_of_clouds(old):
    """FCGF: indices of voxelised points, normalised features at their voxels, gradients."""
    rng = np.random.default_rng(0)
    clouds = [rng.random((900, 3)) * 2, rng.random((700, 3)) * 2]
    if old.ME.__version__ != "0.4.3":  # data come first: nothing has told the release yet
        old.ME.CoordsKey(3)
    coords, feats, picked = old.pair_batch(clouds, 0.1)
    assert len(coords) == sum(map(len, picked)) and coords.dtype == torch.int32
    net = old.ResUNetBN2C(1, 16, conv1_kernel_size=5)
    x = old.ME.SparseTensor(feats, coords=coords).to("cpu")
    y = net(x)
    assert torch.equal(y.C, coords) and y.F.shape == (len(coords), 16)
    torch.testing.assert_close(y.F.norm(dim=1), torch.ones(len(coords)))
    (y.F[: len(picked[0])] @ torch.ones(16)).sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    assert [len(part) for part in y.decomposed_features] == [len(p) for p in picked]
