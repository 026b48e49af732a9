"""Parts of FlexGEMM that its own tests and its users call by name."""

from __future__ import annotations

import importlib

import pytest
import torch

import sparse_bridge
from sparse_bridge.adapters.flex_gemm.errors import ArgumentValueError
from sparse_bridge.errors import DeviceError

from . import installed
from .conftest import DEVICES
from .test_convolutions import voxels, weights

devices = pytest.mark.parametrize("device", DEVICES)
LAYER = (3, 2, 3), (2, 1, 2), (1, 0, 1), (1, 2, 1)  # kernel size, stride, padding, dilation


def strided(function, feats, coords, shape, weight, bias):
    """A strided layer by the parts of its autograd function: (output, its coordinates, cache)."""
    places = function._get_output_coords(coords, shape, *LAYER)
    cache = function._compute_neighbor_cache(coords, places, shape, *LAYER)
    return function._sparse_conv_forward(feats, cache, weight, bias), places, cache


@devices
@pytest.mark.parametrize("with_bias", (True, False))
def test_a_strided_layer_by_its_parts(flex_gemm, with_bias, device):
    spconv = flex_gemm.ops.spconv
    function = spconv.SparseConv3dFunction
    feats, coords, shape = voxels(50, 3, device=device)
    weight = weights(3, 4, LAYER[0], device=device)
    bias = torch.randn(4, dtype=torch.float64, device=device) if with_bias else None
    leaves = [one for one in (feats, weight, bias) if one is not None]
    for leaf in leaves:
        leaf.requires_grad_()
    want, want_places, _ = spconv.sparse_conv3d(feats, coords, shape, weight, bias, None, None, *LAYER[1:])
    out, places, cache = strided(function, feats, coords, shape, weight, bias)
    assert torch.equal(out, want) and torch.equal(places, want_places) and not out.requires_grad
    grad = torch.randn_like(want)
    expected = torch.autograd.grad(want, leaves, grad)
    found = function._sparse_conv_backward(grad, feats, cache, weight, bias)
    assert len(found) == 3 and (found[2] is None) is not with_bias
    for got, one in zip((one for one in found if one is not None), expected, strict=True):
        assert torch.equal(got, one)


def test_the_torch_variants_want_the_explicit_algorithm(flex_gemm):
    spconv = flex_gemm.ops.spconv
    _, coords, shape = voxels(50, 3)
    function = spconv.SparseConv3dFunction
    places = function._get_output_coords_torch(coords, shape, *LAYER)
    kernel, dilation = (3, 3, 3), (1, 1, 1)
    for call in (
        lambda: function._compute_neighbor_cache_torch(coords, places, shape, *LAYER),
        lambda: spconv.SubMConv3dFunction._compute_neighbor_cache_torch(coords, shape, kernel, dilation),
    ):
        with pytest.raises(AssertionError, match="explicit_gemm"):
            call()
    spconv.set_algorithm(spconv.Algorithm.EXPLICIT_GEMM)
    made = function._compute_neighbor_cache_torch(coords, places, shape, *LAYER)
    other = function._compute_neighbor_cache(coords, places, shape, *LAYER)
    assert torch.equal(made["neighbor_map"], other["neighbor_map"])
    assert made["nonesuch"] is None


def test_parts_of_the_strided_function_that_are_replaced(flex_gemm, monkeypatch):
    spconv = flex_gemm.ops.spconv
    function = spconv.SparseConv3dFunction
    feats, coords, shape = voxels(30, 3)
    weight = weights(3, 4, LAYER[0]).requires_grad_()
    call = feats, coords, shape, weight, None, None, None, *LAYER[1:]
    want, *_ = spconv.sparse_conv3d(*call)
    forward, backward = function._sparse_conv_forward, function._sparse_conv_backward
    seen = []

    def noted_forward(*args):
        seen.append("forward")
        return forward(*args)

    def noted_backward(*args):
        seen.append("backward")
        return backward(*args)

    monkeypatch.setattr(function, "_sparse_conv_forward", staticmethod(noted_forward))
    monkeypatch.setattr(function, "_sparse_conv_backward", staticmethod(noted_backward))
    out, *_ = spconv.sparse_conv3d(*call)
    out.sum().backward()
    assert torch.equal(out, want) and seen == ["forward", "backward"]
    (expected,) = torch.autograd.grad(want.sum(), weight)
    assert torch.equal(weight.grad, expected)


def test_parts_of_an_installed_build_are_bridged(flex_gemm, monkeypatch):
    feats, coords, shape = voxels(30, 3)
    weight = weights(3, 4, LAYER[0])
    want, *_ = flex_gemm.ops.spconv.sparse_conv3d(feats, coords, shape, weight, None, None, None, *LAYER[1:])
    real = installed.first(monkeypatch)
    function = real.ops.spconv.SparseConv3dFunction
    with sparse_bridge.enable("flex_gemm", mode="patch"):
        out, _, cache = strided(function, feats, coords, shape, weight, None)
        assert torch.equal(out, want)
        assert function._sparse_conv_backward(out, feats, cache, weight, None) == (None,) * 3
    with pytest.raises(RuntimeError, match="no kernel image"):
        function._sparse_conv_forward(feats, cache, weight, None)


def test_modules_by_their_paths(flex_gemm):
    sampling = importlib.import_module("flex_gemm.ops.grid_sample.grid_sample")
    by_torch = importlib.import_module("flex_gemm.ops.grid_sample.grid_sample_torch")
    grid = flex_gemm.ops.grid_sample
    assert grid.grid_sample is sampling and sampling.grid_sample_3d is grid.grid_sample_3d
    assert by_torch.grid_sample_3d_torch is grid.grid_sample_3d_torch
    assert flex_gemm.kernels.triton.utils is importlib.import_module("flex_gemm.kernels.triton.utils")


def test_what_kernels_ask_of_the_device(flex_gemm, fake_gpu):
    utils = flex_gemm.kernels.triton.utils
    fake_gpu.has(available=False)
    with pytest.raises(DeviceError, match="there is none"):
        utils.get_num_sm()
    assert utils.get_autotune_config(["any"], {"cuda": ["nvidia"]}) == ["nvidia"]
    assert utils.get_autotune_config(["any"], None, {"A100": ["a"]}) == ["any"]
    with pytest.raises(ArgumentValueError, match="no configurations"):
        utils.get_autotune_config(device={"A100": ["a"]})
    fake_gpu.has(available=True, name="NVIDIA a100-SXM4-80GB")
    assert utils.get_autotune_config(["any"], {"cuda": ["n"]}, {"A100": ["a"]}) == ["a"]
