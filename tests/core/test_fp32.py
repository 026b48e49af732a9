"""How fp32 layers multiply: IEEE, TF32, or three TF32 products that are as exact as fp32."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sparse_bridge import settings
from sparse_bridge.core import functional
from sparse_bridge.core.conv import kernel_products, plan
from sparse_bridge.core.conv.kernel_products import octaves
from sparse_bridge.core.device import precision
from sparse_bridge.core.geometry.weights import WeightLayout, layout_of
from sparse_bridge.kernels.gemm.gather_spec import GemmSpec
from sparse_bridge.kernels.gemm.product import Product
from sparse_bridge.kernels.runtime.target import described
from sparse_bridge.kernels.tiles.tile import GemmSize, TileConfig
from sparse_bridge.kernels.tiles.tile_config import gather_tile, wgrad_tile
from tests.checks import assert_close
from tests.core.layers import check, layer, leaves, tensors

SPLITTING = ("sm_80", "sm_90", "sm_100")
OTHERS = ("sm_75", "sm_86", "sm_89", "sm_120", "gfx90a", "gfx942", "gfx1100")


@pytest.mark.parametrize("arch", SPLITTING)
def test_products_are_split_where_that_is_faster(arch):
    target = described(arch)
    assert precision.product_precision(target, torch.float32, "ieee") == "tf32x3"
    assert precision.product_precision(target, torch.float32, "tf32") == "tf32"
    assert precision.product_precision(target, torch.float32, "ieee", wgrad=True) == "ieee"
    assert precision.product_precision(target, torch.float16, "tf32") == "ieee"
    with settings.override(fp32="ieee"):
        assert precision.product_precision(target, torch.float32, "ieee") == "ieee"
        assert precision.product_precision(target, torch.float32, "tf32") == "tf32"


@pytest.mark.parametrize("arch", OTHERS)
def test_products_are_not_split_elsewhere(arch):
    target = described(arch)
    assert precision.product_precision(target, torch.float32, "ieee") == "ieee"
    leave = "tf32" if target.has_tf32 else "ieee"
    assert precision.product_precision(target, torch.float32, "tf32") == leave


def test_weights_that_hopper_wants_in_rows():
    hopper, ampere = described("sm_90"), described("sm_80")
    rows, columns = (layout_of(torch.empty(64, 27, 64), "ovi"), layout_of(torch.empty(27, 64, 64), "vio"))
    assert not precision.reads_rows(hopper, "tf32x3", rows)
    assert precision.reads_rows(hopper, "tf32x3", columns)
    assert precision.reads_rows(hopper, "tf32", rows.transposed())
    assert not precision.reads_rows(hopper, "ieee", columns), "halves, and IEEE fp32"
    assert not precision.reads_rows(ampere, "tf32", columns)
    assert not precision.reads_rows(hopper, "tf32", layout_of(torch.empty(27, 32, 64), "vio"))


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("turned", [False, True], ids=["forward", "dgrad"])
@pytest.mark.parametrize("reverse", [False, True], ids=["in order", "reversed"])
@pytest.mark.parametrize("layout, shape", [("vio", (5, 4, 6)), ("ovi", (6, 5, 4))])
def test_copies_in_rows_hold_the_same_matrices(layout, shape, reverse, turned, groups):
    weight = torch.randn(shape)[:, ::1]
    w = layout_of(weight, layout, groups)
    w = w.transposed() if turned else w
    w = w.reversed() if reverse else w
    copy, rows = w.rows_of(weight), w.in_rows()
    assert rows.strides[1] == 1 and rows.exchanged == w.exchanged
    assert (rows.c_in, rows.c_out, rows.groups) == (w.c_in, w.c_out, w.groups)
    for group in range(groups):
        for mine, want in zip(rows.matrices(copy, group), w.matrices(weight, group), strict=True):
            assert torch.equal(mine, want)


@pytest.mark.parametrize("turned", [False, True], ids=["forward", "dgrad"])
@pytest.mark.parametrize("kind", ["submanifold", "strided", "inverse"])
def test_layers_over_copied_weights(kernel_lane, monkeypatch, request, kind, turned):
    """turned: the input channels of the weight are the closer ones, so that dgrad copies it."""
    copied = []

    def always(target, precision, w):
        copied.append(w.exchanged)
        return abs(w.strides[1]) != 1

    monkeypatch.setattr(kernel_products, "reads_rows", always)
    plan.reset()  # plans that were made under the real rule
    request.addfinalizer(plan.reset)
    made = layer(kind, 2, device=kernel_lane.device)
    x, weight, bias, dy = tensors(made, 6, 10, groups=2)
    rows, leaf_weight, shift = leaves([x, weight, bias], kernel_lane.device)
    held = leaf_weight.transpose(1, 2).contiguous().transpose(1, 2) if turned else leaf_weight
    y = functional.conv(rows, held, shift, made.kmap, groups=2)
    y.backward(dy.to(kernel_lane.device))
    assert sorted(set(copied)) == [False, True]
    x64, weight64, shift64 = leaves([x.double(), weight.double(), bias.double()], "cpu")
    want = made.truth(x64, weight64, shift64, 2)
    want.backward(dy.double())
    for got, truth in ((y, want), (rows.grad, x64.grad), (leaf_weight.grad, weight64.grad)):
        assert_close(got, truth)


@pytest.mark.gpu
@pytest.mark.parametrize("allow_tf32", [False, True], ids=["fp32", "tf32"])
@pytest.mark.parametrize("c_in, c_out, groups", [(64, 64, 1), (33, 130, 1), (128, 256, 2)])
@pytest.mark.parametrize("kind", ["submanifold", "strided", "inverse"])
def test_wide_layers_on_a_gpu(kernel_lane, kind, c_in, c_out, groups, allow_tf32):
    made = layer(kind, 3, shape=(12, 13, 11), device=kernel_lane.device)
    tolerance = "tf32" if allow_tf32 else torch.float32
    check(made, c_in, c_out, kernel_lane, groups=groups, tolerance=tolerance, allow_tf32=allow_tf32)


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [0.0, 6.0], ids=["alike", "wide range"])
def test_split_products_are_as_exact_as_ieee(spread):
    """Errors of both against fp64, of features alike and of features far apart in size."""
    made = layer("submanifold", 3, shape=(24, 24, 24), device="cuda")
    torch.manual_seed(0)
    x = torch.randn(len(made.x_coords), 128) * torch.exp(spread * torch.randn(len(made.x_coords), 1))
    weight = torch.randn(27, 128, 128) / 50
    want = made.truth(x.double(), weight.double())
    scale = want.square().mean(1, keepdim=True).sqrt()
    errors = {}
    for mode in ("auto", "ieee"):
        with settings.override(fp32=mode):
            y = functional.conv(x.cuda(), weight.cuda(), None, made.kmap).cpu().double()
        assert torch.isfinite(y).all()
        errors[mode] = ((y - want) / scale).square().mean().sqrt().item()
    assert errors["auto"] <= 4 * errors["ieee"] and errors["auto"] <= 1e-6, errors


@pytest.mark.gpu
def test_what_is_not_finite_stays_where_it_is():
    made = layer("submanifold", 3, shape=(9, 9, 9), device="cuda")
    x = torch.randn(len(made.x_coords), 64)
    x[3, 5], x[7, 9] = float("inf"), float("nan")
    weight = torch.randn(27, 64, 64)
    want = made.truth(x.double(), weight.double())
    y = functional.conv(x.cuda(), weight.cuda(), None, made.kmap).cpu()
    torch.testing.assert_close(torch.isfinite(y), torch.isfinite(want))
    assert torch.equal(torch.isposinf(y), torch.isposinf(want))


def test_tiles_of_wide_layers():
    """The largest tiles where very many rows fill the GPU, or where the weight does not fit its
    cache."""
    hopper, half = dataclasses.replace(described("sm_90"), compute_units=132), torch.float16

    def blocks(rows, c, order="oi"):
        tile = gather_tile(hopper, half, GemmSize(rows, c, c, 27), order=order)
        return tile.block_m, tile.block_n, tile.block_k

    assert blocks(400_000, 256) == (128, 256, 128)
    assert blocks(400_000, 256, "io") == (128, 128, 64)
    assert blocks(3_840, 1024) == (128, 256, 128)
    assert blocks(848, 1024) == (128, 64, 128), "few rows keep the GPU busy by fewer columns"


def test_tiles_that_queue_rows(fake_gpu):
    """Rows of two steps under way: taller tiles where those fill the GPU, deeper ones while a
    compute unit holds few; not where the offsets are few, sums are in fp16, or Triton is older."""
    hopper, half = dataclasses.replace(described("sm_90"), compute_units=132), torch.float16

    def blocks(rows, c, n_offsets=27, precision="ieee"):
        tile = gather_tile(hopper, half, GemmSize(rows, c, c, n_offsets), precision)
        return tile.block_m, tile.block_n, tile.block_k, tile.num_stages

    assert blocks(10_000, 128) == (64, 128, 128, 7) == blocks(17_000, 128)
    assert blocks(40_000, 128) == (128, 128, 128, 7)
    assert blocks(100_000, 128) == (128, 128, 64, 7) == blocks(1_000_000, 128)
    assert blocks(16_000, 256) == (128, 128, 128, 7) and blocks(100_000, 256)[3] < 7
    assert blocks(100_000, 64) == (128, 64, 64, 7) == blocks(1_000_000, 64)
    assert blocks(100_000, 32) == (128, 32, 32, 7) and blocks(1_000_000, 32)[3] < 7
    assert blocks(100_000, 96) == (128, 128, 32, 10) and blocks(10_000, 96)[3] < 7
    assert blocks(100_000, 64, n_offsets=8)[3] < 7 and blocks(100_000, 64, precision="half")[3] < 7
    assert blocks(10_000, 64, n_offsets=8)[3] == 7 and blocks(10_000, 64, n_offsets=1)[3] < 7
    columns = [gather_tile(hopper, half, GemmSize(n, 64, 64, 27)).block_n for n in (1_500, 5_000, 10_000)]
    assert columns == [16, 32, 64]
    fake_gpu.has(triton=(3, 4, 0))
    assert blocks(100_000, 64)[3] < 7


@pytest.mark.parametrize("stages, over_table", [(2, 2), (3, 3), (7, 5), (10, 7)])
def test_every_offset_needs_one_load_less(stages, over_table):
    """Products that visit every offset read no list of offsets."""
    tile = TileConfig(64, 64, 64, 4, stages)
    assert tile.over_table() == dataclasses.replace(tile, num_stages=over_table)
    hopper = described("sm_90")
    w = WeightLayout((64 * 64, 64, 1, 0), 0, 27, 64, 64, 1)
    product = Product(hopper, torch.device("cpu"), torch.float16, "ieee", w)
    for packed in (True, False):
        spec = GemmSpec(product, tile, packed)
        assert spec.options["num_stages"] == (stages if packed else over_table)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_tiles_depend_on_no_more_than_plans_remember(dtype):
    """A plan's tile is decided once per octave of rows, or number of tiles while those are few: a
    scene that comes first must not decide otherwise than another of its kind."""
    hopper = dataclasses.replace(described("sm_90"), compute_units=132)
    rows = [round(1.13**power) for power in range(135)]
    rows += [132 * 2**power + step for power in range(14) for step in (-1, 0, 1)]
    sizes = ((32, 64, "oi"), (128, 128, "io"), (256, 512, "oi"), (1024, 1024, "io"))
    for c_in, c_out, order in sizes:
        found = {}
        for n in rows:
            kind = octaves(hopper, n, n)
            tile = gather_tile(hopper, dtype, GemmSize(n, c_in, c_out, 27), "ieee", order)
            assert found.setdefault(kind, tile) == tile, (n, c_in)
        found = {}
        for pairs in rows:
            tile = wgrad_tile(hopper, dtype, c_in, c_out, "ieee", pairs)
            assert found.setdefault(pairs.bit_length(), tile) == tile, (pairs, c_in)
