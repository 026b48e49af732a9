"""The two GEMM kernels against fp64, tile by tile, into memory full of NaN."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sparse_bridge.core.conv.activations import activated
from sparse_bridge.core.geometry.weights import layout_of
from sparse_bridge.kernels.gemm import wgrad_gemm
from sparse_bridge.kernels.gemm.gather_gemm import GatherGemm
from sparse_bridge.kernels.gemm.gather_spec import GemmSpec
from sparse_bridge.kernels.gemm.product import EpilogueForm, Product
from sparse_bridge.kernels.gemm.wgrad_gemm import WgradGemm
from sparse_bridge.kernels.gemm.wgrad_spec import WgradSpec
from sparse_bridge.kernels.maps.mask_order import mask_order
from sparse_bridge.kernels.maps.neighbor_table import NeighborTable
from sparse_bridge.kernels.maps.tile_list import TILE
from sparse_bridge.kernels.maps.tile_packing import pack_tiles
from sparse_bridge.kernels.runtime import target as targets
from sparse_bridge.kernels.tiles.activation_numbers import NUMBERS
from sparse_bridge.kernels.tiles.tile import TileConfig
from sparse_bridge.kernels.tiles.tile_config import wgrad_shares
from tests.checks import assert_close
from tests.clouds import features
from tests.conftest import INTERPRETED
from tests.kernels.calls import target_of

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]

NAN = float("nan")
BLOCKS = [(64, 16, 32), (64, 64, 16), (128, 16, 16), (128, 64, 32)]


def random_table(n_offsets, n_rows, n_in, seed=0):
    generator = torch.Generator().manual_seed(seed)
    nbr = torch.randint(0, n_in, (n_offsets, n_rows), generator=generator)
    return torch.where(torch.rand(nbr.shape, generator=generator) < 0.4, nbr, -1).int()


def nan_like(*shape, dtype, device):
    return torch.full(shape, NAN, dtype=torch.float32).to(dtype).to(device)


def gather_truth(x, weight, bias, nbr, groups):
    padded = torch.cat([x.double(), torch.zeros(1, x.shape[1], dtype=torch.float64)])
    parts = []
    for rows, part in zip(padded.chunk(groups, 1), weight.double().chunk(groups, 2), strict=True):
        parts.append(torch.einsum("vni,vio->no", rows[nbr.long()], part))
    y = torch.cat(parts, 1)
    return y if bias is None else y + bias.double()


EPS = 1e-3


def norm_vectors(norm, channels, kind=None):
    """(mean, var, gain, beta) of a normalisation, in `kind`, else in half and single precision."""
    if norm == "none":
        return [None] * 4
    mean, var, gain, beta = (features(1, channels, seed)[0] for seed in (3, 4, 5, 6))
    var = var.abs() + 0.1
    found = [mean.half(), var, *((gain, beta.half()) if norm == "affine" else (None, None))]
    return found if kind is None else [v if v is None else v.to(kind) for v in found]


def run_gather(
    lane,
    tile,
    packed,
    *,
    n=70,
    n_in=50,
    c_in=16,
    c_out=16,
    n_offsets=9,
    groups=1,
    bias=True,
    dtype=torch.float32,
    activation=None,
    nbr=None,
    norm="none",
    residual=False,
    precision="ieee",
    splits=1,
    kind=None,
):
    """(result, fp64 truth) of one launch.  kind: of the norm's vectors, see `norm_vectors`."""
    target, device = target_of(lane), torch.device(lane.device)
    nbr = random_table(n_offsets, n, n_in) if nbr is None else nbr
    x = features(n_in, groups * c_in, dtype=dtype)
    weight = features(n_offsets * c_in, groups * c_out, 1, dtype) / (n_offsets * c_in) ** 0.5
    weight = weight.view(n_offsets, c_in, groups * c_out)
    shift = features(1, groups * c_out, 2, dtype)[0] if bias else None
    added = features(n, groups * c_out, 7, dtype) if residual else None
    vectors = [shift, *norm_vectors(norm, groups * c_out, kind), added]
    table = nbr.to(device)
    if packed:
        made = NeighborTable(table)
        table = pack_tiles(made, mask_order(made, target, splits), target, splits)
    w = layout_of(weight, "vio", groups)
    parts = bias + {"none": 0, "statistics": 2, "affine": 6}[norm] + 8 * residual
    end = EpilogueForm(parts, activation, 0.1, EPS)
    product = Product(target, device, dtype, precision, w, end)
    gemm = GatherGemm(GemmSpec(product, tile, packed, splits=splits), table, n, n_in)
    y = nan_like(n, groups * c_out, dtype=dtype, device=device)
    placed = [None if t is None else t.to(device) for t in vectors]
    assert gemm(x.to(device), weight.to(device), placed, y) is y
    want = gather_truth(x, weight, shift, nbr, groups)
    if norm != "none":
        mean, var, gain, beta = (None if t is None else t.to(want.dtype) for t in vectors[1:5])
        want = torch.nn.functional.batch_norm(want, mean, var, gain, beta, eps=EPS)
    return y, want if added is None else want + added.double()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("block_m, block_n, block_k", BLOCKS)
def test_tiles_of_the_gather_gemm(kernel_lane, block_m, block_n, block_k, packed):
    """Channels that fill the tile and such that overrun it."""
    tile = TileConfig(block_m, block_n, block_k, 4, 2)
    for c_in, c_out in ((block_k, 64), (40, 70)):
        y, want = run_gather(kernel_lane, tile, packed, c_in=c_in, c_out=c_out)
        assert_close(y, want)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("n", [1, TILE - 1, TILE, TILE + 1, 2 * TILE, 2 * TILE + 1])
def test_rows_around_the_tile(kernel_lane, n, packed):
    for block_m in (TILE, 2 * TILE):
        y, want = run_gather(kernel_lane, TileConfig(block_m, 16, 16, 4, 2), packed, n=n)
        assert_close(y, want)


@pytest.mark.parametrize("packed", [True, False])
def test_sums_in_fp16(kernel_lane, packed):
    """Leave to add fp16 products up in fp16: still about as close as fp16 is."""
    y, want = run_gather(
        kernel_lane,
        TileConfig(64, 16, 16, 4, 2),
        packed,
        n_offsets=3,
        dtype=torch.float16,
        precision="half",
        activation="relu",
    )
    assert_close(y, want.relu(), torch.float16)


@pytest.mark.skipif(INTERPRETED, reason="numpy multiplies blocks of other sizes in other orders")
@pytest.mark.parametrize("c_in, c_out", [(16, 33), (40, 16), (64, 64)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_row_has_the_same_bits_in_every_tile(kernel_lane, dtype, c_in, c_out):
    """Tiles of other sizes, with other rows beside it, or none, and over a table."""
    target = target_of(kernel_lane)
    if dtype == torch.bfloat16 and not target.has_bf16:
        pytest.skip("no bf16 products here")
    nbr = random_table(9, 200, 150)
    nbr[:, 100:] = torch.where(torch.rand(9, 100) < 0.7, -1, nbr[:, 100:])
    sizes = {"n_in": 150, "c_in": c_in, "c_out": c_out, "dtype": dtype}
    generation = target.generation
    found = {}
    for m, n, k in itertools.product((16, 32, 64, 128), (16, 32, 64), (16, 32, 64)):
        packed = (m + n + k) % 3 != 0
        if m < (generation.least_rows if packed else 64) or n < generation.least_columns:
            continue
        tile = TileConfig(m, n, k, 4, 2)
        found[tile, packed], _ = run_gather(kernel_lane, tile, packed, n=200, nbr=nbr, **sizes)
    assert len(found) >= 4
    first, *others = found.items()
    for how, y in others:
        assert torch.equal(y, first[1]), (how, first[0])
    some = torch.tensor([3, 77, 120, 199])
    alone, _ = run_gather(kernel_lane, first[0][0], True, n=4, nbr=nbr[:, some], **sizes)
    assert torch.equal(alone, first[1][some.to(alone.device)])


@pytest.mark.parametrize("activation", [None, "relu", "leaky_relu"])
@pytest.mark.parametrize("norm", ["none", "statistics", "affine"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_epilogues_have_the_bits_of_separate_operations(kernel_lane, dtype, norm, activation):
    """torch's own norm on a GPU; elsewhere torch has another one."""
    if norm != "none" and kernel_lane.device != "cuda":
        pytest.skip("torch's norm of the CPU rounds elsewhere")
    if dtype == torch.bfloat16 and not target_of(kernel_lane).has_bf16:
        pytest.skip("no bf16 products here")
    tile, sizes = TileConfig(64, 32, 16, 4, 2), {"c_in": 16, "c_out": 33, "dtype": dtype}
    sizes |= {"n": 130, "nbr": random_table(9, 130, 50)}
    y, _ = run_gather(kernel_lane, tile, True, **sizes)
    if norm != "none":
        mean, var, gain, beta = (v if v is None else v.to(y.device, dtype) for v in norm_vectors(norm, 33, dtype))
        y = F.batch_norm(y, mean, var, gain, beta, eps=EPS)
    y = y + features(130, 33, 7, dtype).to(y.device)
    if activation is not None:
        y = y.relu() if activation == "relu" else F.leaky_relu(y, 0.1)
    kinds = {"norm": norm, "kind": dtype, "residual": True, "activation": activation}
    fused, _ = run_gather(kernel_lane, tile, True, **sizes, **kinds)
    assert torch.equal(fused, y)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    "dtype, activation, bias",
    [(torch.float16, "relu", True), (torch.bfloat16, "leaky_relu", False), (torch.float32, "leaky_relu", True)],
)
def test_dtypes_and_epilogues(kernel_lane, dtype, activation, bias, packed):
    if dtype == torch.bfloat16 and not target_of(kernel_lane).has_bf16:
        pytest.skip("no bf16 products here")
    y, want = run_gather(
        kernel_lane,
        TileConfig(64, 32, 32, 4, 2),
        packed,
        c_in=32,
        c_out=32,
        dtype=dtype,
        activation=activation,
        bias=bias,
    )
    assert_close(y, activated(want, activation, 0.1), dtype)


@pytest.mark.parametrize("activation", [name for name in NUMBERS if name])
def test_every_number_is_an_activation(kernel_lane, activation):
    y, want = run_gather(kernel_lane, TileConfig(64, 16, 16, 4, 2), True, c_in=16, c_out=33, activation=activation)
    plain, _ = run_gather(kernel_lane, TileConfig(64, 16, 16, 4, 2), True, c_in=16, c_out=33)
    assert torch.equal(y, activated(plain, activation, 0.1)), "bits"
    assert not torch.equal(y, plain)
    assert_close(y, activated(want, activation, 0.1))


@pytest.mark.parametrize(
    "norm, bias, activation", [("affine", True, "relu"), ("affine", False, None), ("statistics", False, "leaky_relu")]
)
def test_norms(kernel_lane, norm, bias, activation):
    y, want = run_gather(
        kernel_lane,
        TileConfig(64, 16, 16, 4, 2),
        True,
        c_in=16,
        c_out=33,
        groups=1 + bias,
        activation=activation,
        bias=bias,
        norm=norm,
    )
    assert_close(y, activated(want, activation, 0.1))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    "dtype, norm, bias, activation",
    [
        (torch.float32, "none", False, None),
        (torch.float16, "none", True, "leaky_relu"),
        (torch.float16, "affine", False, "relu"),
        (torch.bfloat16, "statistics", True, None),
        (torch.float32, "affine", True, "relu"),
        (torch.float16, "none", False, "relu"),
    ],
)
def test_residuals(kernel_lane, dtype, norm, bias, activation, packed):
    """Behind the norm and before the activation, in every row, also those without a neighbour."""
    if dtype == torch.bfloat16 and not target_of(kernel_lane).has_bf16:
        pytest.skip("no bf16 products here")
    for n, c_out in ((TILE - 1, 16), (2 * TILE + 1, 33)):
        nbr = random_table(9, n, 50)
        nbr[:, ::3] = -1
        y, want = run_gather(
            kernel_lane,
            TileConfig(TILE, 32, 16, 4, 2),
            packed,
            n=n,
            c_in=16,
            c_out=c_out,
            groups=2,
            nbr=nbr,
            dtype=dtype,
            activation=activation,
            bias=bias,
            norm=norm,
            residual=True,
        )
        assert_close(y, activated(want, activation, 0.1), dtype)


@pytest.mark.parametrize("packed", [True, False])
def test_rows_without_neighbours_hold_the_bias(kernel_lane, packed):
    nbr = random_table(9, 70, 50)
    nbr[:, ::3] = -1
    y, want = run_gather(kernel_lane, TileConfig(64, 16, 16, 4, 2), packed, nbr=nbr)
    assert_close(y, want)
    nothing = torch.full((9, 70), -1, dtype=torch.int32)
    y, want = run_gather(kernel_lane, TileConfig(64, 16, 16, 4, 2), packed, nbr=nothing)
    assert_close(y, want)


def test_tables_beyond_32_bits(kernel_lane):
    """V x N >= 2^31 entries, of which the last offset's are read."""
    n_offsets, pitch, n = 65, 1 << 25, 5
    if kernel_lane.device != "cpu" and torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    small = random_table(n_offsets, n, 50)
    small[-1] = torch.arange(n)
    try:
        big = torch.from_numpy(np.zeros((n_offsets, pitch), np.int32))  # zero pages cost nothing
    except MemoryError:
        pytest.skip("the system does not promise that much memory")
    big[:, :n] = small
    big = big.to(kernel_lane.device)
    target, device = target_of(kernel_lane), torch.device(kernel_lane.device)
    x, weight = features(50, 16), features(n_offsets * 16, 16, 1).view(n_offsets, 16, 16) / 32
    w = layout_of(weight, "vio")
    product = Product(target, device, torch.float32, "ieee", w)
    gemm = GatherGemm(GemmSpec(product, TileConfig(64, 16, 16, 4, 2), False), big, n, 50)
    y = nan_like(n, 16, dtype=torch.float32, device=device)
    gemm(x.to(device), weight.to(device), None, y)
    assert_close(y, gather_truth(x, weight, None, small, 1))


def run_wgrad(lane, tile, lengths, *, n=60, c_in=16, c_out=16, groups=1, dtype=torch.float32, mirrored=False):
    """(result, fp64 truth) for lists of the given lengths; mirrored: of offsets 0 .. V / 2 only."""
    target, device = target_of(lane), torch.device(lane.device)
    generator = torch.Generator().manual_seed(len(lengths))
    lists = [torch.randint(0, n, (2, length), generator=generator).int() for length in lengths]
    pairs = torch.cat(lists, 1)
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int64)
    if mirrored:
        lists = lists + [pair.flip(0) for pair in lists[-2::-1]]
    x, dy = features(n, groups * c_in, 1, dtype), features(n, groups * c_out, 2, dtype)
    dw = nan_like(len(lists), c_in, groups * c_out, dtype=torch.float32, device=device)
    w = layout_of(dw, "vio", groups)
    spec = WgradSpec(Product(target, device, dtype, "ieee", w), tile, mirrored)
    there = pairs[0].to(device), pairs[1].to(device), starts.to(device)
    gemm = WgradGemm(spec, there, n, n)
    gemm(x.to(device), dy.to(device), dw)
    want = []
    for i, j in lists:
        left, right = x.double()[i.long()].chunk(groups, 1), dy.double()[j.long()].chunk(groups, 1)
        want.append(torch.cat([a.t() @ b for a, b in zip(left, right, strict=True)], 1))
    return gemm, dw, torch.stack(want)


LENGTHS = {
    "even": [40] * 9,
    "ragged": [0, 1, 33, 0, 200, 7, 64, 0, 16],
    "one": [150],
    "one pair": [0, 0, 1, 0],
    "none": [0, 0, 0],
    "many": [3] * 40,
}


@pytest.fixture
def shared(monkeypatch):
    """Call it with how many programs shall share the pairs; 0: one per offset."""
    return lambda n: monkeypatch.setattr(wgrad_gemm, "wgrad_shares", lambda *_: n)


@pytest.mark.parametrize("shares", [0, 40])
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("mirrored", [False, True])
def test_lists_of_the_wgrad(kernel_lane, name, mirrored, shares, shared):
    shared(shares)
    tile = TileConfig(16, 16, 32, 4, 2)
    gemm, dw, want = run_wgrad(kernel_lane, tile, LENGTHS[name], mirrored=mirrored)
    assert gemm.direct == (shares == 0)
    assert_close(dw, want)


@pytest.mark.parametrize("block_m, block_n, block_k", [(16, 16, 16), (64, 32, 64), (32, 64, 32)])
def test_tiles_of_the_wgrad(kernel_lane, block_m, block_n, block_k, shared):
    tile = TileConfig(block_m, block_n, block_k, 4, 2)
    for c_in, c_out, shares in ((64, 64, 6), (70, 5, 6), (64, 64, 0), (3, 5, 2)):
        shared(shares)
        _, dw, want = run_wgrad(kernel_lane, tile, LENGTHS["ragged"], c_in=c_in, c_out=c_out)
        assert_close(dw, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shares", [0, 5])
def test_dtypes_of_the_wgrad(kernel_lane, dtype, shares, shared):
    shared(shares)
    if dtype == torch.bfloat16 and not target_of(kernel_lane).has_bf16:
        pytest.skip("no bf16 products here")
    tile = TileConfig(32, 32, 32, 4, 2)
    _, dw, want = run_wgrad(kernel_lane, tile, LENGTHS["ragged"], c_in=32, c_out=32, dtype=dtype)
    assert_close(dw, want, dtype)


@pytest.mark.parametrize("shares", [0, 3])
@pytest.mark.parametrize("mirrored", [False, True])
def test_groups_of_the_wgrad(kernel_lane, mirrored, shares, shared):
    shared(shares)
    tile = TileConfig(16, 16, 16, 4, 2)
    for channels in (7, 20):
        _, dw, want = run_wgrad(
            kernel_lane, tile, LENGTHS["ragged"], c_in=channels, c_out=9, groups=2, mirrored=mirrored
        )
        assert_close(dw, want)


def test_who_shares_the_wgrad(kernel_lane):
    """Short lists are not cut up; long ones are, into no more parts than fill the device."""
    tile = TileConfig(16, 16, 16, 4, 2)
    units = target_of(kernel_lane).compute_units
    gemm, dw, want = run_wgrad(kernel_lane, tile, [3] * 9)
    assert gemm.direct
    assert_close(dw, want)
    gemm, dw, want = run_wgrad(kernel_lane, tile, [0, 6000, 7], n=6000)
    assert not gemm.direct and 1 < gemm.shares <= 4 * units
    assert_close(dw, want)


def test_shares_of_the_wgrad():
    h200 = dataclasses.replace(targets.described("sm_90"), compute_units=132)

    def shares(tile, channels, n_pairs, longest, n_offsets=27):
        shape = (n_offsets, channels, channels)
        return wgrad_shares(h200, tile, torch.float16, "ieee", shape, 1, n_pairs, longest)

    small, large = TileConfig(32, 32, 64, 4, 3), TileConfig(128, 128, 64, 4, 3)
    assert shares(small, 32, 284_298, 94_444) == 4 * 132
    # A partial result of many channels costs more than the few steps that it saves.
    assert 20 <= shares(large, 256, 17_916, 2_310) <= 60
    assert shares(large, 256, 82_412, 9_504) == 66  # two programs of such a tile per unit
    assert shares(large, 256, 1_000, 200) == 0
    assert shares(small, 32, 40, 3) == 0
    assert shares(large, 1024, 190_000, 15_192) == 0  # 64 blocks of 27 offsets fill it


@pytest.mark.parametrize("results, n_offsets", [(15, 1), (1024, 27), (65536, 27), (1 << 20, 125)])
def test_shape_of_the_sum(results, n_offsets):
    shares, block = wgrad_gemm.sum_shape(results, n_offsets, 132)
    assert shares * block == wgrad_gemm.SUM_LOADS and block in wgrad_gemm.SUM_BLOCKS
    programs = -(-results // block) * n_offsets
    assert programs < 32 * 132 or block == wgrad_gemm.SUM_BLOCKS[-1]
