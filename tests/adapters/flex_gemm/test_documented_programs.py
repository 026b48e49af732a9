"""Programs over everything that FlexGEMM documents: each name as its users call it, against another
way to the same numbers."""

from __future__ import annotations

import copy
import importlib
import pickle
import pkgutil

import pytest
import torch
from torch.nn.functional import conv3d

import sparse_bridge

from . import installed

KERNEL, STRIDE, ONE = (3, 3, 3), (2, 2, 2), (1, 1, 1)
ALGORITHMS = (
    "EXPLICIT_GEMM",
    "IMPLICIT_GEMM",
    "IMPLICIT_GEMM_SPLITK",
    "MASKED_IMPLICIT_GEMM",
    "MASKED_IMPLICIT_GEMM_SPLITK",
)


def shell(resolution, channels, dtype=torch.float32):
    """Voxels between two spheres: (features, coordinates, shape)."""
    line = torch.linspace(-1, 1, resolution)
    radius = torch.stack(torch.meshgrid(line, line, line, indexing="ij")).norm(dim=0)
    cells = torch.nonzero((radius < 0.9) & (radius > 0.7)).int()
    coords = torch.nn.functional.pad(cells, (1, 0))
    feats = torch.randn(len(coords), channels).to(dtype)
    return feats, coords, torch.Size((1, channels, *(resolution,) * 3))


@pytest.fixture(params=["standin", "patch"])
def ops(request, flex_gemm, monkeypatch):
    """`flex_gemm.ops`, of the stand-in or of a patched package."""
    if request.param == "standin":
        yield flex_gemm.ops
        return
    real = installed.first(monkeypatch)
    real.ops.spconv.Algorithm = flex_gemm.ops.spconv.Algorithm
    with sparse_bridge.enable("flex_gemm", mode="patch"):
        yield real.ops


def same(one, other):
    return one.dtype == other.dtype and torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_against_a_dense_convolution(ops, algorithm):
    feats, coords, shape = shell(10, 8)
    weight, bias = torch.randn(16, *KERNEL, 8), torch.randn(16)
    ops.spconv.ALGORITHM = getattr(ops.spconv.Algorithm, algorithm)
    place = (0, slice(None), *coords[:, 1:].long().t())
    leaves = [one.clone().requires_grad_() for one in (feats, weight, bias)]
    clones = [one.clone().requires_grad_() for one in (feats, weight, bias)]
    dense = torch.zeros(1, 10, 10, 10, 8)
    dense = dense.index_put(tuple(coords.long().t()), clones[0]).movedim(-1, 1)
    want = conv3d(dense, clones[1].permute(0, 4, 1, 2, 3), clones[2], padding=1)[place].t()
    out, _ = ops.spconv.sparse_submanifold_conv3d(leaves[0], coords, shape, leaves[1], leaves[2])
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
    grad = torch.randn(out.shape)
    mine = torch.autograd.grad(out, leaves, grad)
    torch.testing.assert_close(mine, torch.autograd.grad(want, clones, grad), rtol=1e-4, atol=1e-3)
    # The same by the parts.
    function = ops.spconv.SubMConv3dFunction
    cache = function._compute_neighbor_cache(coords, shape, KERNEL, ONE)
    part = function._sparse_submanifold_conv_forward(leaves[0], cache, leaves[1], leaves[2])
    assert torch.equal(part, out) and not part.requires_grad
    parts = function._sparse_submanifold_conv_backward(grad, leaves[0], cache, *leaves[1:])
    torch.testing.assert_close(parts, mine)


def test_functions_by_apply(ops):
    feats, coords, shape = shell(10, 8)
    weight = torch.randn(16, *KERNEL, 8)
    out, cache = ops.spconv.SubMConv3dFunction.apply(feats, coords, shape, None, weight)
    want, _ = ops.spconv.sparse_submanifold_conv3d(feats, coords, shape, weight)
    assert torch.equal(out, want)
    _, again = ops.spconv.SubMConv3dFunction.apply(feats, None, None, cache, weight, None, ONE)
    assert again is cache
    layer = (STRIDE, ONE, ONE)
    z, places, known = ops.spconv.SparseConv3dFunction.apply(feats, coords, shape, None, weight, None, None, *layer)
    zz, given, kept = ops.spconv.SparseConv3dFunction.apply(feats, coords, shape, known, weight, None, places, *layer)
    assert kept is known and torch.equal(z, zz) and torch.equal(places, given)


def test_maps_of_the_extension_and_of_caches(flex_gemm):
    _, coords, shape = shell(10, 8)
    cuda, spconv = flex_gemm.kernels.cuda, flex_gemm.ops.spconv
    table = flex_gemm.ops.utils.init_hashmap(shape, int(spconv.HASHMAP_RATIO * len(coords)), "cpu")
    built = cuda.hashmap_build_submanifold_conv_neighbour_map(*table, coords, 10, 10, 10, *KERNEL, *ONE)
    cache = spconv.SubMConv3dFunction._compute_neighbor_cache(coords, shape, KERNEL, ONE, True)
    spconv.set_algorithm(spconv.Algorithm.EXPLICIT_GEMM)
    by_torch = spconv.SubMConv3dFunction._compute_neighbor_cache_torch(coords, shape, KERNEL, ONE)
    for one in (cache, by_torch):
        assert one["neighbor_map"].dtype == torch.uint32 and same(one["neighbor_map"], built)
    found = cuda.neighbor_map_post_process_for_masked_implicit_gemm_1(built)
    names = ("gray_code", "sorted_idx", "valid_signal_i", "valid_signal_o", "valid_signal_seg")
    for one, name in zip(found, names, strict=True):
        assert same(one, cache[name]), name
    blocks = cuda.neighbor_map_post_process_for_masked_implicit_gemm_2(*found[:2], 64)
    assert same(blocks[0], cache.valid_kernel_64) and same(blocks[1], cache.valid_kernel_seg_64)
    assert same(blocks[0], cache.valid_kernel_callback(64))
    cache.neighbor_map = built[:32]
    assert len(cache.valid_kernel_seg_64) == 2, "of the new map"
    with pytest.raises(AttributeError, match="valid_kernel_0"):
        cache.valid_kernel_0  # noqa: B018


def test_output_coordinates_all_ways(flex_gemm):
    feats, coords, shape = shell(10, 8)
    cuda, spconv = flex_gemm.kernels.cuda, flex_gemm.ops.spconv
    layer = (KERNEL, STRIDE, ONE, ONE)
    function, numbers = spconv.SparseConv3dFunction, (1, 10, 10, 10, *sum(layer, ()))
    places = function._get_output_coords(coords, shape, *layer)
    assert torch.equal(places, function._get_output_coords_torch(coords, shape, *layer))
    assert torch.equal(places, cuda.hashmap_build_sparse_conv_out_coords(coords, 1.1, 0, *numbers))
    for mode in (0, 1, 2):
        spconv.SERIALIZATION_MODE = mode
        _, found, _ = spconv.sparse_conv3d(
            feats, coords, shape, torch.randn(4, *KERNEL, 8), None, None, None, STRIDE, ONE
        )
        assert torch.equal(torch.unique(found, dim=0), places)
        expanded = cuda.expand_unique_build_sparse_conv_out_coords(coords, mode, *numbers)
        assert torch.equal(found, expanded)
    cache = function._compute_neighbor_cache(coords, places, shape, *layer, True, False)
    forward, back = cuda.hashmap_build_sparse_conv_neighbour_map(coords, places, 2.0, True, *numbers)
    assert same(cache["neighbor_map"], forward) and same(cache["neighbor_map_bwd"], back)
    assert cache["nothing"] is None


def test_sampling_by_rows_and_weights(flex_gemm):
    feats, coords, shape = shell(10, 8)
    cuda, triton = flex_gemm.kernels.cuda, flex_gemm.kernels.triton
    points = 10 * torch.rand(1, 50, 3)
    table = flex_gemm.ops.utils.init_hashmap(shape, 2 * len(coords), "cpu")
    rows, shares = cuda.hashmap_build_grid_sample_3d_trilinear_neighbor_map_weight(*table, coords, points, 10, 10, 10)
    rows, shares, leaf = rows.view(-1, 8), shares.view(-1, 8), feats.clone().requires_grad_()
    want = flex_gemm.ops.grid_sample.grid_sample_3d_torch(leaf, coords, shape, points)[0]
    torch.testing.assert_close(triton.indice_weighed_sum_fwd(feats, rows, shares), want)
    grad = torch.randn(want.shape)
    back = triton.indice_weighed_sum_bwd_input(grad, rows, shares, len(feats))
    torch.testing.assert_close(back, torch.autograd.grad(want, leaf, grad)[0])
    near = cuda.hashmap_build_grid_sample_3d_nearest_neighbor_map(*table, coords, points, 10, 10, 10)
    found = near.view(torch.int32).view(-1) >= 0
    nearest = flex_gemm.ops.grid_sample.grid_sample_3d(feats, coords, shape, points, "nearest")[0]
    assert torch.equal(nearest.any(1), found)


def test_caches_are_copied_and_pickled(flex_gemm):
    feats, coords, shape = shell(8, 4)
    weight, spconv = torch.randn(6, *KERNEL, 4), flex_gemm.ops.spconv
    out, cache = spconv.sparse_submanifold_conv3d(feats, coords, shape, weight)
    z, places, strided = spconv.sparse_conv3d(feats, coords, shape, weight, stride=STRIDE)
    for copied in (copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
        clone = copied(cache)
        assert type(clone) is type(cache) and same(clone.neighbor_map, cache.neighbor_map)
        again, _ = spconv.sparse_submanifold_conv3d(feats, coords, shape, weight, None, clone)
        torch.testing.assert_close(again, out, rtol=1e-4, atol=1e-4)
        again, _, _ = spconv.sparse_conv3d(feats, coords, shape, weight, None, copied(strided), places, STRIDE)
        torch.testing.assert_close(again, z, rtol=1e-4, atol=1e-4)


def test_maps_are_read_in_inference_mode(flex_gemm):
    feats, coords, shape = shell(8, 4)
    weight, spconv = torch.randn(6, *KERNEL, 4), flex_gemm.ops.spconv
    with torch.inference_mode():
        out, cache = spconv.sparse_submanifold_conv3d(feats, coords, shape, weight)
        assert cache["neighbor_map"].is_inference()
        again, _ = spconv.sparse_submanifold_conv3d(feats, coords, shape, weight, None, cache)
    assert torch.equal(again, out)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("c_in, c_out", [(24, 48), (48, 24), (1, 1), (3, 17)])
def test_channels_dtypes_and_frozen_parts(ops, dtype, c_in, c_out):
    feats, coords, shape = shell(7, c_in, dtype)
    weight = torch.randn(c_out, *KERNEL, c_in).to(dtype) / 9
    wide = [one.double().clone().requires_grad_() for one in (feats, weight)]
    function = ops.spconv.sparse_submanifold_conv3d
    want = torch.autograd.grad(function(wide[0], coords, shape, wide[1])[0].sum(), wide)
    near = {"rtol": 3 * torch.finfo(dtype).eps, "atol": 30 * torch.finfo(dtype).eps}
    for learns in ((True, True), (True, False), (False, True)):
        leaves = [one.clone().requires_grad_(wanted) for one, wanted in zip((feats, weight), learns, strict=True)]
        out, _ = function(leaves[0], coords, shape, leaves[1])
        assert out.dtype == dtype
        out.sum().backward()
        for leaf, wanted, grad in zip(leaves, learns, want, strict=True):
            assert (leaf.grad is not None) == wanted
            if wanted:
                torch.testing.assert_close(leaf.grad, grad.to(dtype), **near)


def test_every_module_of_the_kernels_is_found(flex_gemm):
    triton = flex_gemm.kernels.triton
    found = [one.name for one in pkgutil.walk_packages(triton.__path__, triton.__name__ + ".")]
    assert f"{triton.__name__}.spconv.config" in found
    for name in found:
        assert importlib.import_module(name)
