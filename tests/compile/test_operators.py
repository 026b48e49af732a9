"""Every operator by `torch.library.opcheck`; what operators refuse; what handles own."""

from __future__ import annotations

import functools
import gc

import pytest
import torch

import sparse_bridge.compile
from sparse_bridge.core import functional as sparse
from sparse_bridge.core.compile import handles
from sparse_bridge.core.ops.norm_operators import MEMORY_ROWS
from sparse_bridge.core.ops.row_matrix import RowMatrix
from sparse_bridge.errors import CoordinateError, LifecycleError, ShapeError, UnsupportedError
from tests.clouds import cloud
from tests.compile.programs import DEVICES
from tests.releases import since

ops = torch.ops.sparse_bridge
GRID = (12, 12, 12)
SUBM = [3, 1, 0, 0, 3, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 2, *GRID]
DOWN = [3, 0, 0, 0, 2, 2, 2, 2, 2, 2, 0, 0, 0, 1, 1, 1, 0, 0, 0, 2, *GRID]
TS = [0, 2, 2, 2, 2, 2, 2, 0, 0, 0, 1, 1, 1, 0, 0, 0]
ME = [3, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0]
ME_DOWN = [3, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, *([0] * 24)]


HANDLES = (
    "coordinates",
    "coordinate_map",
    "expanded_map",
    "map",
    "map_between",
    "map_of_pairs",
    "new_map",
    "submanifold_map",
    "minkowski_insert",
    "minkowski_interpolation",
    "minkowski_origin",
    "minkowski_prune",
    "minkowski_relation",
    "minkowski_union",
    "same_rows",
)
_ANY = ("test_schema", "test_autograd_registration", "test_faketensor")
# Handles of two calls are two numbers; programs show that their graphs compute the same.
CHECKS = {True: _ANY, False: (*_ANY, "test_aot_dispatch_dynamic")}


@pytest.fixture(scope="module")
def coords():
    return cloud(GRID, 2, 0.05)


def features(n, c, device="cpu"):
    return torch.randn(n, c, requires_grad=True, device=device)


def cases(coords):
    """Arguments of each operator, by name."""
    n, device = len(coords), coords.device
    randn = functools.partial(torch.randn, device=device)
    rand = functools.partial(torch.rand, device=device)
    kmap = sparse.submanifold(sparse.coordinate_map(coords, GRID, 2), sparse.kernel_offsets((3, 3, 3)))
    sites, same = ops.coordinates(coords), handles.make(kmap)
    asked = coords, sites, 0, 0
    x, dy, weight = features(n, 4, device), randn(n, 5), randn(27, 4, 5)
    weight, bias, form = weight.requires_grad_(), randn(5), ("vio", 1, "ieee", "")
    memory = torch.zeros(MEMORY_ROWS * 4, device=device)
    batch, shape = coords[:, 0].contiguous(), [2, *GRID]
    return {
        "coordinates": [(coords,)],
        "map": [(*asked, "spconv", SUBM)],
        "new_map": [(*asked, "spconv", DOWN, 1), (*asked, "torchsparse", TS, 2)],
        "minkowski_insert": [(coords, [1, 1, 1])],
        "same_rows": [(x.detach(), False), (x.detach(), True)],
        "conv": [(x, weight, bias.requires_grad_(), n, same, *form, False), (x, weight, None, n, same, *form, True)],
        "conv_backward": [
            (dy, x.detach(), weight.detach(), bias.detach(), same, *form, False, [True] * 3),
            (dy, x.detach(), weight.detach(), None, same, *form, True, [False, True, False]),
        ],
        "conv_fused": [
            (
                x.detach(),
                weight.detach(),
                None,
                n,
                same,
                *form,
                False,
                None,
                None,
                None,
                None,
                dy,
                0.0,
                "leaky_relu",
                0.1,
            ),
            (x.detach(), weight.detach(), bias.detach(), n, same, *form, False, *rand(4, 5), None, 1e-3, "relu", 0.0),
        ],
        "batch_norm": [(x, bias.detach()[:4], bias.detach()[1:], 1e-3, relu) for relu in (True, False)],
        "batch_norm_backward": [
            (randn(n, 4), x.detach(), bias.detach()[:4], None, memory, 1e-3, True),
            (randn(n, 4), x.detach(), None, None, memory, 1e-3, False),
        ],
        "pool": [(x, n, same, mode, 0.0, False) for mode in ("max", "avg", "sum")],
        "pool_backward": [(randn(n, 4), x.detach(), n, same, "max", 0.0, False)],
        "global_pool": [(x, batch, 2, mode) for mode in ("max", "avg")],
        "global_pool_backward": [(randn(2, 4), x.detach(), batch, 2, "avg")],
        "to_dense": [(x, coords, shape, first, not first, -1, 0) for first in (True, False)],
        "to_dense_backward": [(randn(2, 4, *GRID), x.detach(), coords, shape, True, False, 0, 0)],
        "flex_gemm_grid_sample": [(x, coords, shape, 12 * rand(2, 7, 3), mode) for mode in ("trilinear", "nearest")],
        "flex_gemm_grid_sample_backward": [(randn(2, 7, 4), x.detach(), coords, shape, 12 * rand(2, 7, 3), "nearest")],
        "voxel_codes": [(coords, 4, curve, True) for curve in ("z_order", "hilbert")],
        "voxels_of_codes": [(torch.arange(99, device=device).int(), 4, "hilbert")],
        **functional_cases(coords),
        **minkowski_cases(coords),
        **point_cases(coords, x),
    }


def functional_cases(coords):
    """Operators that build the maps of `core.functional`."""
    given, fine = (coords, GRID, 2, "error"), ops.coordinate_map(coords, GRID, 2, "error")
    box = [number for offset in sparse.kernel_offsets((2, 2, 2)).values for number in offset]
    first = torch.arange(5, device=coords.device)
    expanded = coords, fine, box, 3, [2]
    return {
        "coordinate_map": [given, (coords, None, None, "ignore")],
        "expanded_map": [(*expanded, None, "strided", 1), (*expanded, GRID, "generative", 2)],
        "map_between": [(fine, fine, box, 3, [1, 1, 2])],
        "map_of_pairs": [([first, first.int()], [first, first], 7, 8)],
        "submanifold_map": [(fine, box, 3)],
    }


def minkowski_cases(coords):
    """Operators on the maps of one manager."""
    _, distinct, sites = ops.minkowski_insert(coords, [1, 1, 1])
    fine = distinct, sites, 0, 0, [1, 1, 1]
    _, coarse, coarse_sites = ops.new_map(*fine[:4], "minkowski", ME_DOWN, 1)
    down = coarse, coarse_sites, 0, 0, [2, 2, 2]
    origin, origin_sites = ops.minkowski_origin(*fine)
    pairs = [list(pair) for pair in zip(fine[:4], down[:4], strict=True)]
    query = distinct.float() + 0.25
    query[:, 0] = distinct[:, 0]
    return {
        "minkowski_interpolation": [(*fine, query)],
        "minkowski_items": [(*fine, origin, origin_sites, 0, 0, [0, 0, 0])],
        "minkowski_origin": [fine],
        "minkowski_prune": [(*fine, distinct[:, 1] > 3, 1)],
        "minkowski_relation": [(*fine, *down, ME_DOWN)],
        "minkowski_union": [(*pairs, [1, 1, 1, 2, 2, 2], 1)],
    }


def point_cases(coords, x):
    """Sums and copies of rows, and torchsparse's functions on points."""
    n, rows = len(coords), torch.arange(len(coords), device=coords.device)
    dx, cell = torch.randn_like(x), (rows * 7 % 31).int()
    counts = ops.count_index(cell, 31)
    pairs = handles.make(RowMatrix(cell.long(), rows, None, 31, n))
    y, corners = features(31, 4, coords.device), cell.repeat(8, 1).t().contiguous()
    dy, weights = y.detach(), torch.rand(n, 8, device=coords.device)
    return {
        "count_index": [(cell, 31)],
        "devoxelize": [(y, corners, weights)],
        "devoxelize_backward": [(dx, 31, corners, weights)],
        "find_keys": [
            (ops.hash_rows(coords, None, 1, False), ops.hash_rows(coords, None, 1, False), wide)
            for wide in (False, True)
        ],
        "hash_rows": [(coords, None, 1, False), (coords, torch.ones_like(coords[:8, 1:]), 0, True)],
        "row_product": [(x, 31, pairs, mode) for mode in ("sum", "avg", "max")],
        "row_product_backward": [(dy, x.detach(), 31, pairs, "avg")],
        "spread": [(y, cell.long())],
        "spread_backward": [(dx, 31, cell.long())],
        "torchsparse_items": [(coords, 0, "GlobalMaxPool")],
        "trilinear_weights": [(coords[:, 1:].float() + 0.3, corners, 1.0)],
        "voxelize": [(x, cell, counts)],
        "voxelize_backward": [(dy, n, cell, counts)],
    }


def test_there_is_a_case_for_every_operator(coords):
    expected = {f"sparse_bridge::{name}" for name in cases(coords)}
    assert set(sparse_bridge.compile.operators()) == expected


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", [name.partition("::")[2] for name in sparse_bridge.compile.operators()])
@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(name, device, coords, plain_settings):
    for arguments in cases(coords.to(device))[name]:
        torch.library.opcheck(getattr(ops, name), arguments, test_utils=CHECKS[name in HANDLES])


def test_a_map_of_minkowski(coords, plain_settings):
    _, distinct, sites = ops.minkowski_insert(coords, [1, 1, 1])
    asked = distinct, sites, 0, 0, "minkowski", ME
    torch.library.opcheck(ops.map, asked, test_utils=CHECKS[True])


@pytest.mark.parametrize("transposed", (False, True))
def test_gradients_are_those_of_the_engine(coords, transposed, plain_settings):
    cmap = sparse.coordinate_map(coords, GRID, 2)
    coarse, kmap = sparse.strided(cmap, sparse.kernel_offsets((2, 2, 2), padding=0), 2, (6, 6, 6))
    n_in, n_out = len(coords), len(coarse.coords)
    if transposed:
        n_in, n_out = n_out, n_in
    x, weight, bias = features(n_in, 3), features(8, 15), features(1, 5)
    given = x, weight.view(8, 3, 5), bias[0]
    y = ops.conv(*given, n_out, handles.make(kmap), "vio", 1, "ieee", "", transposed)
    z = sparse.conv(*given, sparse.inverse(kmap) if transposed else kmap)
    dy = torch.randn_like(z)
    assert torch.equal(y, z)
    for mine, theirs in zip(
        torch.autograd.grad(y, (x, weight, bias), dy), torch.autograd.grad(z, (x, weight, bias), dy), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_equal_coordinates_have_gradients(coords, plain_settings):
    twice = torch.cat([coords, coords[:7]])
    cmap = sparse.coordinate_map(twice, GRID, 2)
    kmap = sparse.submanifold(cmap, sparse.kernel_offsets((3, 3, 3)))
    x, weight = features(len(twice), 3), features(27, 15).view(27, 3, 5)
    y = ops.conv(x, weight, None, len(twice), handles.make(kmap), "vio", 1, "ieee", "", False)
    z = sparse.conv(x, weight, None, kmap)
    grads = [torch.autograd.grad(r.square().sum(), (x, weight)) for r in (y, z)]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_handle_owns_its_object(coords):
    gc.collect()
    before = handles.count()
    handle = ops.coordinates(coords)
    alias = handle.detach()
    del handle
    assert handles.count() == before + 1
    number = alias.clone()
    del alias
    gc.collect()
    assert handles.count() == before
    with pytest.raises(LifecycleError, match="stands for no Sites"):
        ops.map(coords, number, 0, 0, "spconv", SUBM)


def test_a_tensor_that_was_overwritten_is_not_the_one_that_was_entered(coords, plain_settings):
    mine = coords.clone()
    first = ops.coordinates(mine)
    again = ops.coordinates(mine)
    mine.numpy()[:, 1] = GRID[0] - 1 - mine.numpy()[:, 1]  # as graphs write: unseen by versions
    other = ops.coordinates(mine)
    stores = [handles.value_of(h, object) for h in (first, again, other)]
    assert stores[0] is stores[1] and stores[0] is not stores[2]


def test_too_few_rows_are_refused(coords, plain_settings):
    one = coords[:1].contiguous()
    with pytest.raises(ShapeError, match="serves 2 and more"):
        ops.new_map(one, ops.coordinates(one), 0, 0, "spconv", DOWN, 2)


def test_a_dense_grid_refuses_coordinates_outside(coords):
    with pytest.raises(CoordinateError, match="the grid holds 4"):
        ops.to_dense(torch.ones(len(coords), 1), coords, [2, 4, 4, 4], True, False, -1, 0)


def test_maps_of_nobody_are_refused(coords):
    with pytest.raises(UnsupportedError, match=r"import sparse_bridge\.compile"):
        ops.map(coords, ops.coordinates(coords), 0, 0, "nobody", [])


def product(coords):
    cmap = sparse.coordinate_map(coords, GRID, 2)
    handle = handles.make(sparse.submanifold(cmap, sparse.kernel_offsets((3, 3, 3))))
    weight = features(27, 12).detach().view(27, 4, 3)

    def run(x):
        return ops.conv(x, weight, None, len(coords), handle, "vio", 1, "ieee", "", False)

    return run


@pytest.mark.parametrize("name", ("row_product", "spread", "voxelize", "devoxelize"))
def test_gradients_of_rows_by_finite_differences(name, coords, plain_settings):
    for x, *rest in point_cases(coords, features(len(coords), 4))[name]:
        wide = x.detach().double()[:, :2].contiguous().requires_grad_()

        def run(x, rest=rest):
            return getattr(ops, name)(x, *rest)

        assert torch.autograd.gradcheck(run, wide, check_forward_ad=False, fast_mode=True)


@since(2, 5, "vmap is not for operators")
def test_second_order_and_vmap_are_refused(coords, plain_settings):
    run, x = product(coords), features(len(coords), 4)
    (dx,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="no gradient of its own"):
        dx.sum().backward()
    with pytest.raises(UnsupportedError, match="no batch dimension"):
        torch.func.vmap(run)(torch.randn(2, len(coords), 4))
