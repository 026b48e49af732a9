"""Patches of an installed torchsparse."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

import sparse_bridge
from sparse_bridge import settings
from sparse_bridge.errors import LifecycleError, UnsupportedError

from . import real
from .conftest import speaking
from .test_conv import points

RELEASES = {"2.1.0": "2.1", "2.0.0b": "2.0", "1.4.0": "1.4"}


@pytest.fixture
def site(tmp_path, monkeypatch, plain_settings):
    sparse_bridge.disable()
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sparse_bridge.disable()
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchsparse"]:
        del sys.modules[name]


def run(module, release):
    """Down and up again; weights do not depend on who runs them."""
    torch.manual_seed(3)
    nn = module.nn
    net = torch.nn.Sequential(
        nn.Conv3d(4, 4, 3), nn.BatchNorm(4), nn.Conv3d(4, 5, 2, stride=2), nn.Conv3d(5, 4, 2, stride=2, transposed=True)
    )
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    coords = points(release)
    x = torch.randn(len(coords), 4, requires_grad=True)
    y = net(module.SparseTensor(x, coords))
    y.feats.square().sum().backward()
    return y, x.grad, [p.grad for p in net.parameters()], net


@pytest.mark.parametrize("version", RELEASES)
def test_an_installed_torchsparse_computes_as_the_stand_in_does(site, version):
    release = RELEASES[version]
    with speaking(release) as standin:
        want = run(standin, release)
    real.write(site, version)
    importlib.invalidate_caches()
    import torchsparse

    assert "standin" not in torchsparse.__file__
    untouched = torchsparse.nn.functional.conv3d
    handle = sparse_bridge.enable("torchsparse")
    status = handle.status()["torchsparse"]
    assert (status.mode, status.version) == ("patch", version)
    assert status.notes[0].startswith(f"profile {release} (torchsparse {version} is installed)")
    got = run(torchsparse, release)
    assert type(got[0]) is torchsparse.SparseTensor
    assert torch.equal(got[0].coords, want[0].coords) and torch.equal(got[0].feats, want[0].feats)
    assert torch.equal(got[1], want[1])
    assert all(torch.equal(a, b) for a, b in zip(got[2], want[2], strict=True))
    caches = getattr(got[0], "_caches", got[0])
    assert set(caches.cmaps) == {(1, 1, 1), (2, 2, 2)} and len(caches.kmaps) == 2
    F = torchsparse.nn.functional
    keys = F.sphash(points(release))
    assert keys.dtype == torch.int64 and F.sphashquery(keys, keys).tolist() == list(range(len(keys)))
    assert F.spcount(torch.tensor([1], dtype=torch.int32), 2).tolist() == [0, 1]
    dense = release == "2.1"
    if dense:
        x = torchsparse.SparseTensor(torch.ones(1, 2), torch.zeros(1, 4, dtype=torch.int32), 1, (1, 1, 1, 2))
        assert x.dense().tolist() == torchsparse.utils.to_dense(x.feats, x.coords, (1, 1, 1, 2)).tolist()
        assert x.dense().tolist() == [[[[[1.0, 1.0], [0.0, 0.0]]]]]
    handle.disable()
    assert torchsparse.nn.functional.conv3d is untouched
    assert F.sphash(keys) == "original"
    assert got[3][0](got[0])[0] == "original", "live layers follow"


def test_grid_mode_runs_in_the_original(site):
    real.write(site, "2.0.0b")
    importlib.invalidate_caches()
    with sparse_bridge.enable("torchsparse") as handle:
        import torchsparse

        F, coords = torchsparse.nn.functional, points("2.0")
        x = torchsparse.SparseTensor(torch.randn(len(coords), 4), coords)
        options = {"epsilon": 0.0, "mm_thresh": 0, "kmap_mode": "grid"}
        assert F.conv3d(x, torch.zeros(27, 4, 4), 3, **options)[0] == "original"
        options["kmap_mode"] = "hashmap"
        assert F.conv3d(x, torch.zeros(27, 4, 4), 3, **options).feats.shape == (len(coords), 4)
        counted = handle.report().layers["torchsparse"]["Conv3d"]
        assert counted.bridged == 1 and sum(counted.original.values()) == 1
    with sparse_bridge.enable("torchsparse", strict=True), pytest.raises(UnsupportedError, match="grid"):
        options["kmap_mode"] = "grid"
        F.conv3d(x, torch.zeros(27, 4, 4), 3, **options)


def test_profiles_that_contradict_the_installation(site, monkeypatch):
    real.write(site, "1.4.0")
    importlib.invalidate_caches()
    with pytest.raises(LifecycleError, match=r"profile '2.1' was asked for, but torchsparse 1.4.0"):
        sparse_bridge.enable("torchsparse", profile="2.1")
    with settings.override(torchsparse_profile="2.0"), pytest.raises(LifecycleError, match=r"'2.0' was asked for"):
        sparse_bridge.enable("torchsparse")
    sparse_bridge.enable("torchsparse", profile="1.4").disable()


@pytest.mark.parametrize("version", ["1.2.0", "3.0.1", "unknown"])
def test_unsupported_versions(site, version):
    real.write(site, version)
    importlib.invalidate_caches()
    with pytest.raises(UnsupportedError, match=r"patches are written for 1\.4, 2\.0 and 2\.1"):
        sparse_bridge.enable("torchsparse")


def test_a_broken_installation_still_says_which_release_it_is(site):
    real.write(site, "1.4.0")
    (site / "torchsparse" / "tensor.py").write_text("raise OSError('libcudart.so.11.0')")
    folder = site / "torchsparse-1.4.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torchsparse\nVersion: 1.4.0\n")
    importlib.invalidate_caches()
    with sparse_bridge.enable("torchsparse") as handle:
        status = handle.status()["torchsparse"]
        assert status.mode == "standin" and "libcudart" in status.reason
        assert status.notes[0].startswith("profile 1.4 (torchsparse 1.4.0 is installed)")
    with sparse_bridge.enable("torchsparse", profile="2.1") as handle:
        assert handle.status()["torchsparse"].version == "2.1.0"


def test_maps_that_the_original_made_are_read(site):
    """Enabled half way: the caches hold the framework's own entries."""
    release = "1.4"
    with speaking(release) as standin:
        want = run(standin, release)[0]
        entry = next(v for k, v in want.kmaps.items() if k[2] == (2, 2, 2))
        plain, (coarse, fine) = list(entry), (want.cmaps[2, 2, 2], want.cmaps[1, 1, 1])
        kernel = torch.randn(8, 4, 3)
        down = standin.SparseTensor(torch.randn(len(coarse), 4), coarse, 2)
        down.cmaps, down.kmaps = want.cmaps, want.kmaps
        expected = standin.nn.functional.conv3d(down, kernel, 2, stride=2, transposed=True).F
    real.write(site, "1.4.0")
    importlib.invalidate_caches()
    with sparse_bridge.enable("torchsparse"):
        import torchsparse

        x = torchsparse.SparseTensor(down.F, coarse, 2)
        x.cmaps[1, 1, 1] = fine
        x.kmaps[(1, 1, 1), (2, 2, 2), (2, 2, 2), (1, 1, 1)] = plain
        y = torchsparse.nn.functional.conv3d(x, kernel, 2, stride=2, transposed=True)
        torch.testing.assert_close(y.feats, expected)
