"""An installed FlexGEMM 2.0 whose kernels do not run here: its layers and functions, patched, give
what the stand-in gives."""

from __future__ import annotations

import pytest
import torch

import sparse_bridge
from sparse_bridge.adapters.flex_gemm import options
from sparse_bridge.adapters.flex_gemm.v2 import convolutions, modules
from sparse_bridge.errors import UnsupportedError

from . import installed
from .test_convolutions import voxels

LAYERS = {
    "SubmanifoldConv3d": ((4, 8, 3), {"dilation": 1}),
    "SparseConv3d": ((4, 8, 2), {"stride": 2, "padding": 0, "dilation": 1}),
    "SparseConvTranspose3d": ((4, 8, (2, 2, 2)), {"stride": 2, "padding": 0, "dilation": 1}),
    "SubmanifoldPool3d": ((), {"kernel_size": 3, "reduce": "max"}),
    "SparsePool3d": ((), {"kernel_size": 2, "stride": None, "padding": 0, "reduce": "mean"}),
    "SparseUpsample3d": ((), {"scale_factor": 2, "mode": "nearest", "padding_mode": "normalize"}),
    "SparsePixelUnshuffle3d": ((), {"downscale_factor": 2}),
    "SparsePixelShuffle": ((), {"upscale_factor": (2, 1, 1)}),
}


@pytest.fixture
def scene(flex_gemm):
    """(features, coordinates, shape); 1.x is not enabled any more."""
    feats, coords, shape = voxels(60, 4, dtype=torch.float32)
    sparse_bridge.disable()
    return feats, coords, (shape[0], *shape[2:], shape[1])


@pytest.mark.parametrize("name", LAYERS)
def test_layers(monkeypatch, scene, name):
    sizes, options = LAYERS[name]
    with sparse_bridge.enable("flex_gemm", mode="standin", profile="2.0"):
        from flex_gemm import nn

        ours = getattr(nn, name)(*sizes, **options)
        want = ours(*scene)
    theirs = getattr(installed.second(monkeypatch).nn, name)(*sizes, **options)
    theirs.load_state_dict(ours.state_dict())
    with pytest.raises(RuntimeError, match="no kernel image"):
        theirs(*scene)
    with sparse_bridge.enable("flex_gemm"):
        status = sparse_bridge.status()["flex_gemm"]
        assert status.mode == "patch" and "profile 2.0" in status.notes[0]
        found = theirs(*scene)
        assert len(found) == len(want) and torch.equal(found[0], want[0])
        again = theirs(*scene, neighbor_cache=found[-1])
        assert again[-1] is found[-1] and torch.equal(again[0], found[0])
        if sizes:
            theirs.bias.requires_grad_(False)
            found[0].sum().backward()
            assert theirs.weight.grad is not None
    with pytest.raises(RuntimeError, match="no kernel image"):
        theirs(*scene)


def test_functions_caches_and_the_switch(monkeypatch, scene):
    feats, coords, shape = scene
    real = installed.second(monkeypatch)
    inner = real.ops.pool.sparse_pool
    owners = (real, real.ops, real.ops.spconv, real.ops.pool, inner, real.nn)
    before = {owner: dict(vars(owner)) for owner in owners}
    weight, seen = torch.randn(8, 3, 3, 3, 4), []

    def form(*asked):
        seen.append(options.form(*asked).precision)
        return options.form(*asked)

    monkeypatch.setattr(convolutions, "form", form)
    with sparse_bridge.enable("flex_gemm", mode="patch"):
        y, cache = real.submanifold_conv3d(feats, coords, shape, weight)
        assert isinstance(cache, real.ops.NeighborCache)
        again, _ = real.ops.submanifold_conv(feats, coords, shape, weight, neighbor_cache=cache)
        with pytest.warns(DeprecationWarning):
            old, _ = real.ops.spconv.sparse_submanifold_conv3d(feats, coords, shape, weight)
        assert torch.equal(again, y) and torch.equal(old, y)
        pooled = [of.sparse_pool3d(feats, coords, shape, kernel_size=2)[0] for of in (inner, real)]
        assert torch.equal(*pooled) and real.ops.pool.sparse_pool is inner
        assert real.config.SPCONV_ALLOW_TF32 is None and set(seen) == {"ieee"}
        real.submanifold_conv3d(feats, coords, shape, weight, allow_tf32=True)
        assert seen[-1] == "tf32"
    assert real.config.SPCONV_ALLOW_TF32 is True
    for owner, held in before.items():
        assert vars(owner) == held


def test_a_switch_that_was_assigned_stays(monkeypatch, scene):
    real = installed.second(monkeypatch)
    real.config.SPCONV_ALLOW_TF32 = False
    with sparse_bridge.enable("flex_gemm"):
        assert real.config.SPCONV_ALLOW_TF32 is False


def test_a_layer_with_other_attributes_says_so(monkeypatch, scene):
    real = installed.second(monkeypatch)
    with sparse_bridge.enable("flex_gemm"):
        layer = real.nn.SubmanifoldPool3d(reduce="max")
        with pytest.raises(UnsupportedError, match="no attribute 'kernel_size'"):
            layer(*scene)


def test_replaced_functions_lead_to_the_original(monkeypatch, scene):
    real = installed.second(monkeypatch)
    with sparse_bridge.enable("flex_gemm") as handle:
        layer = real.nn.SubmanifoldConv3d(4, 8, 3, dilation=1)
        want = layer(*scene)[0]
        for module, name in ((real.ops, "submanifold_conv3d"), (real, "submanifold_conv"), (real.ops, "NeighborCache")):
            with monkeypatch.context() as patch:
                patch.setattr(module, name, lambda *args: None)
                with pytest.raises(RuntimeError, match="no kernel image"):
                    layer(*scene)
                assert f"{name} is replaced" in str(handle.report())
        with monkeypatch.context() as patch:  # no step of this layer
            patch.setattr(real.ops, "sparse_pool3d", lambda *args: None)
            assert torch.equal(layer(*scene)[0], want)


def test_functions_that_were_replaced_before(monkeypatch, scene):
    real = installed.second(monkeypatch)
    real.ops.build_neighbor_cache = mine = lambda *args: None
    with sparse_bridge.enable("flex_gemm"):
        assert real.ops.build_neighbor_cache is mine
        with pytest.raises(RuntimeError, match="no kernel image"):
            real.nn.SubmanifoldConv3d(4, 8, 3, dilation=1)(*scene)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("compiled", (False, True))
def test_the_standin_refuses_replaced_functions(monkeypatch, scene, name, compiled):
    sizes, options = LAYERS[name]
    with sparse_bridge.enable("flex_gemm", mode="standin", profile="2.0"):
        import flex_gemm

        layer = getattr(flex_gemm.nn, name)(*sizes, **options)
        run = torch.compile(layer, backend="eager") if compiled else layer
        want = run(*scene)[0]
        steps = [modules._LAYERS[name.removesuffix("3d")].function.__name__, "build_neighbor_cache"]
        steps += [steps[0] + "3d"] * name.endswith("3d")
        for step in steps:
            with monkeypatch.context() as patch:
                patch.setattr(flex_gemm.ops, step, lambda *args: None)
                with pytest.raises(UnsupportedError, match=f"{step} was replaced"):
                    run(*scene)
        assert torch.equal(run(*scene)[0], want)
