"""The gather-GEMM of narrow inputs against fp64, into memory full of NaN."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sparse_bridge.core.geometry.weights import layout_of
from sparse_bridge.kernels.gemm import gather_spec
from sparse_bridge.kernels.gemm.narrow import packs_offsets, tile_of
from sparse_bridge.kernels.gemm.narrow_gemm import NarrowGemm, NarrowSpec
from sparse_bridge.kernels.gemm.product import EpilogueForm, Product
from sparse_bridge.kernels.maps.mask_order import mask_order
from sparse_bridge.kernels.maps.neighbor_table import NeighborTable
from sparse_bridge.kernels.maps.tile_list import TILE
from sparse_bridge.kernels.maps.tile_packing import pack_tiles
from sparse_bridge.kernels.runtime import target as targets
from sparse_bridge.kernels.runtime.architectures import compiled
from sparse_bridge.kernels.tiles.narrow_tile import OFFSETS, WIDEST
from tests.checks import assert_close
from tests.clouds import features
from tests.kernels.calls import schedules, target_of
from tests.kernels.test_gemm import EPS, gather_truth, nan_like, norm_vectors, random_table

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]

PLAIN = EpilogueForm()
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def product_of(target, device, w, dtype=torch.float32, end=PLAIN, precision="ieee"):
    return Product(target, device, dtype, precision, w, end)


def run(
    lane,
    packed,
    c_in,
    c_out=16,
    *,
    n=70,
    n_in=50,
    n_offsets=27,
    dtype=torch.float32,
    nbr=None,
    layout="vio",
    columns=None,
    shift=0,
    bias=False,
    norm="none",
    residual=False,
    activation=None,
    block_m=TILE,
    precision="ieee",
):
    """(launch, arguments of it, fp64 truth).  columns: of the memory that x is cut from, from
    `shift` on."""
    target, device = target_of(lane), torch.device(lane.device)
    nbr = random_table(n_offsets, n, n_in) if nbr is None else nbr
    whole = features(n_in, columns or c_in, dtype=dtype)
    x = whole[:, shift : shift + c_in]
    weight = features(n_offsets * c_in, c_out, 1, dtype) / (n_offsets * c_in) ** 0.5
    weight = weight.view(n_offsets, c_in, c_out)
    held = weight if layout == "vio" else weight.permute(2, 0, 1).contiguous()
    vectors = [features(1, c_out, 2, dtype)[0] if bias else None, *norm_vectors(norm, c_out)]
    vectors.append(features(n, c_out, 7, dtype) if residual else None)
    table = nbr.to(device)
    if packed:
        made = NeighborTable(table)
        table = pack_tiles(made, mask_order(made, target), target)
    parts = bias + {"none": 0, "statistics": 2, "affine": 6}[norm] + 8 * residual
    end = EpilogueForm(parts, activation, 0.1, EPS)
    product = product_of(target, device, layout_of(held, layout), dtype, end, precision)
    assert packs_offsets(product.w, product.precision)
    tile = dataclasses.replace(tile_of(product), block_m=block_m)
    gemm = NarrowGemm(NarrowSpec(product, tile, packed), table, n, n_in)
    placed = [None if t is None else t.to(device) for t in vectors]
    args = (whole.to(device)[:, shift : shift + c_in], held.to(device), placed)
    want = gather_truth(x, weight, vectors[0], nbr, 1)
    if norm != "none":
        mean, var, gain, beta = (None if t is None else t.double() for t in vectors[1:5])
        want = torch.nn.functional.batch_norm(want, mean, var, gain, beta, eps=EPS)
    want = want if vectors[5] is None else want + vectors[5].double()
    leaky = torch.where(want > 0, want, 0.1 * want)
    return gemm, args, {"relu": want.relu(), "leaky_relu": leaky, None: want}[activation]


def check(lane, packed, *sizes, dtype=torch.float32, precision="ieee", **options):
    """The launch is right, and the same bit by bit a second time; it."""
    if dtype == torch.bfloat16 and not target_of(lane).has_bf16:
        pytest.skip("no bf16 products here")
    gemm, args, want = run(lane, packed, *sizes, dtype=dtype, precision=precision, **options)
    results = []
    for _ in range(2):
        y = nan_like(*want.shape, dtype=dtype, device=torch.device(lane.device))
        assert gemm(*args, y) is y
        results.append(y)
    assert_close(results[0], want, dtype if dtype != torch.float32 else precision)
    assert torch.equal(*results)
    return gemm


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("layout", ["vio", "ovi"])
@pytest.mark.parametrize("c_in", range(1, WIDEST + 1))
def test_channels(kernel_lane, c_in, layout, packed):
    gemm = check(kernel_lane, packed, c_in, 33, layout=layout, dtype=torch.float16)
    assert gemm.spec.even == (c_in in (1, 2, 4, 8))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("n", [1, TILE - 1, TILE, TILE + 1, 2 * TILE, 2 * TILE + 1])
def test_rows_around_the_tile(kernel_lane, n, packed):
    for block_m, c_in in ((TILE, 4), (2 * TILE, 3)):
        check(kernel_lane, packed, c_in, n=n, block_m=block_m)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("n_offsets", [2, 3, 8, OFFSETS, OFFSETS + 1, 2 * OFFSETS, 125])
def test_offsets_around_the_step(kernel_lane, n_offsets, packed):
    for c_in in (1, 4, 5):
        check(kernel_lane, packed, c_in, n_offsets=n_offsets, dtype=torch.float16)


@pytest.mark.parametrize("packed", [True, False])
def test_rows_and_tiles_without_neighbours(kernel_lane, packed):
    """They hold the bias; and columns beyond one block."""
    nbr = random_table(27, 2 * TILE + 5, 50)
    nbr[:, ::3] = -1
    nbr[:, TILE:] = -1
    check(kernel_lane, packed, 4, 130, n=2 * TILE + 5, nbr=nbr, bias=True, dtype=torch.float16)
    check(kernel_lane, packed, 4, n=9, nbr=torch.full((27, 9), -1, dtype=torch.int32), bias=True)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"bias": True, "activation": "leaky_relu"},
        {"norm": "affine", "activation": "relu"},
        {"norm": "statistics", "bias": True},
        {"residual": True},
        {"norm": "affine", "residual": True, "activation": "relu"},
    ],
    ids=str,
)
def test_epilogues(kernel_lane, options, dtype, packed):
    for c_in, layout in ((3, "ovi"), (4, "vio")):
        check(kernel_lane, packed, c_in, 17, layout=layout, dtype=dtype, n=TILE + 1, **options)


@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
def test_products_of_tf32(kernel_lane, precision):
    target = target_of(kernel_lane)
    if not (target.has_tf32 if precision == "tf32" else target.splits_fp32):
        pytest.skip("no such products here")
    gemm, args, want = run(kernel_lane, True, 4, 32, precision=precision)
    y = nan_like(*want.shape, dtype=torch.float32, device=torch.device(kernel_lane.device))
    assert_close(gemm(*args, y), want, precision if precision == "tf32" else torch.float32)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("columns, shift", [(8, 0), (8, 4), (6, 0), (5, 1), (16, 3)])
def test_rows_of_wider_memory(kernel_lane, columns, shift, packed):
    """Their starts and distances are multiples of the width, or anything."""
    for dtype in (torch.float16, torch.float32):
        gemm = check(kernel_lane, packed, 4, columns=columns, shift=shift, dtype=dtype)
        assert (gemm._strided is None) == (columns % 4 == 0)


@pytest.mark.parametrize("packed", [True, False])
def test_wide_offsets(kernel_lane, packed, rules):
    rules.set(gather_spec, INT32_END=100)
    for c_in, layout in ((4, "ovi"), (3, "vio")):
        gemm = check(kernel_lane, packed, c_in, layout=layout, columns=5, dtype=torch.float16)
        assert gemm.spec.wide
    assert check(kernel_lane, packed, 4, 64).tile.block_n == 32


def test_turns_of_the_waves(kernel_lane):
    for _ in schedules(kernel_lane):
        check(kernel_lane, True, 4, 16, dtype=torch.float16, bias=True)


def test_which_products():
    target, device = targets.described("sm_90"), torch.device("cpu")

    def packed(c_in, n_offsets=27, groups=1, precision="ieee"):
        w = layout_of(torch.empty(n_offsets, c_in, 16 * groups), "vio", groups)
        product = product_of(target, device, w, torch.float16, precision=precision)
        return packs_offsets(product.w, product.precision)

    assert [packed(c) for c in (1, 3, 8, 9, 16)] == [True, True, True, False, False]
    assert not packed(4, 1) and not packed(4, groups=2) and not packed(4, precision="half")


@pytest.mark.parametrize("arch", compiled())
def test_tiles_hold_whole_offsets(arch):
    target, device = targets.described(arch), torch.device("cpu")
    for c_in in range(1, WIDEST + 1):
        for dtype in (torch.float16, torch.float32):
            w = layout_of(torch.empty(27, c_in, 64), "vio")
            tile = tile_of(product_of(target, device, w, dtype))
            assert tile.block_k >= max(16, c_in) and tile.block_m == TILE
