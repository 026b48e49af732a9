"""The grouped gather-GEMM and the sums of its products against fp64, into memory full of NaN."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge.core.geometry.weights import layout_of
from sparse_bridge.core.maps import pair_groups
from sparse_bridge.core.maps.pair_lists import PairLists
from sparse_bridge.core.maps.rulebook import Rulebook
from sparse_bridge.kernels.gemm import grouped_gemm
from sparse_bridge.kernels.gemm.grouped_gemm import GroupedGemm, GroupedSpec, pieces_of
from sparse_bridge.kernels.gemm.product import EpilogueForm, Product
from sparse_bridge.kernels.tiles.tile import TileConfig
from tests.checks import assert_close
from tests.clouds import features
from tests.kernels.calls import schedules, target_of
from tests.kernels.test_gemm import EPS, norm_vectors

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]

TILE = TileConfig(64, 16, 16, 4, 2)


def random_pairs(lengths, n_in, n_out, seed=0):
    """(x rows, y rows, offsets), offset by offset; rows repeat."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    x_rows = torch.randint(0, n_in, (total,), generator=generator)
    y_rows = torch.randint(0, n_out, (total,), generator=generator)
    return x_rows, y_rows, torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def rulebook_of(pairs, lengths, n_in, n_out, device):
    x_rows, y_rows, _ = pairs
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    lists = PairLists(x_rows.to(device), y_rows.to(device), starts, False)
    return Rulebook(n_in, n_out, len(lengths), torch.device(device), lists=lists, regular=None)


def truth(x, weight, pairs, n_out, groups=1):
    x_rows, y_rows, offsets = pairs
    y = torch.zeros(n_out, weight.shape[2], dtype=torch.float64)
    wide = weight.shape[2] // groups
    for p, v in enumerate(offsets.tolist()):
        for g, part in enumerate(x[x_rows[p]].double().chunk(groups)):
            columns = slice(g * wide, (g + 1) * wide)
            y[y_rows[p], columns] += part @ weight[v, :, columns].double()
    return y


def run(
    lane,
    lengths,
    *,
    tile=TILE,
    n_in=50,
    n_out=40,
    c_in=16,
    c_out=16,
    groups=1,
    dtype=torch.float32,
    pairs=None,
    norm="none",
    bias=False,
    residual=False,
    activation=None,
):
    """(result, fp64 truth)."""
    target, device = target_of(lane), torch.device(lane.device)
    pairs = random_pairs(lengths, n_in, n_out) if pairs is None else pairs
    book = rulebook_of(pairs, lengths, n_in, n_out, lane.device)
    x = features(n_in, groups * c_in, dtype=dtype)
    weight = features(len(lengths) * c_in, groups * c_out, 1, dtype) / c_in**0.5
    weight = weight.view(len(lengths), c_in, groups * c_out)
    shift = features(1, groups * c_out, 2, dtype)[0] if bias else None
    added = features(n_out, groups * c_out, 7, dtype) if residual else None
    vectors = [shift, *norm_vectors(norm, groups * c_out), added]
    parts = bias + {"none": 0, "statistics": 2, "affine": 6}[norm] + 8 * residual
    end = EpilogueForm(parts, activation, 0.1, EPS)
    spec = GroupedSpec(Product(target, device, dtype, "ieee", layout_of(weight, "vio", groups), end), tile)
    groups_of = pair_groups.pair_groups(book, 0, target)
    gemm = GroupedGemm(spec, groups_of.groups, groups_of.tiles(spec.tile.block_m), n_out, n_in)
    y = torch.full((n_out, groups * c_out), float("nan")).to(dtype).to(device)
    placed = [None if t is None else t.to(device) for t in vectors]
    assert gemm(x.to(device), weight.to(device), placed, y) is y
    want = truth(x, weight, pairs, n_out, groups)
    want = want if shift is None else want + shift.double()
    if norm != "none":
        mean, var, gain, beta = (None if t is None else t.to(want.dtype) for t in vectors[1:5])
        want = torch.nn.functional.batch_norm(want, mean, var, gain, beta, eps=EPS)
    want = want if added is None else want + added.double()
    return y, want.relu() if activation == "relu" else want


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 128, 129])
def test_pairs_around_the_tile(kernel_lane, length):
    for block_m in (64, 128):
        y, want = run(kernel_lane, [3, length, 0, 5], tile=TileConfig(block_m, 16, 16, 4, 2))
        assert_close(y, want)


def test_no_pairs_at_all(kernel_lane):
    y, want = run(kernel_lane, [0, 0], bias=True)
    assert_close(y, want)


@pytest.mark.parametrize("c_in, c_out", [(1, 1), (16, 33), (40, 70), (33, 5)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_channels_and_dtypes(kernel_lane, c_in, c_out, dtype):
    if dtype == torch.bfloat16 and not target_of(kernel_lane).has_bf16:
        pytest.skip("no bf16 products here")
    tile = TileConfig(64, 32, 32, 4, 2)
    y, want = run(kernel_lane, [30, 70, 1], tile=tile, c_in=c_in, c_out=c_out, dtype=dtype)
    assert_close(y, want, dtype)


def test_groups_of_channels(kernel_lane):
    y, want = run(kernel_lane, [30, 70], groups=3, c_in=9, c_out=20)
    assert_close(y, want)


@pytest.mark.parametrize(
    "norm, bias, residual, activation",
    [
        ("none", True, False, "relu"),
        ("affine", True, False, "relu"),
        ("statistics", False, True, None),
        ("none", False, True, "relu"),
    ],
)
def test_epilogues(kernel_lane, norm, bias, residual, activation):
    y, want = run(kernel_lane, [30, 70, 9], c_out=33, norm=norm, bias=bias, residual=residual, activation=activation)
    assert_close(y, want)


def test_rows_that_most_pairs_meet(kernel_lane, rules):
    """Their products are added in pieces, level by level."""
    rules.set(grouped_gemm, LONGEST=8, _PIECE=4)
    lengths = [90, 60]
    x_rows, y_rows, offsets = random_pairs(lengths, 50, 7)
    y_rows[::2] = 3
    y, want = run(kernel_lane, lengths, pairs=(x_rows, y_rows, offsets), n_out=9, bias=True, residual=True)
    assert_close(y, want)


@pytest.mark.parametrize("lengths", [[0, 0, 0], [5, 0, 1000, 1], [1024, 1024], [70000, 3]])
def test_pieces_add_up(lengths, rules):
    """Every entry lies in one piece of its row, however many levels there are."""
    rules.set(grouped_gemm, _PIECE=16)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    values = torch.arange(int(starts[-1]), dtype=torch.float64) + 1
    cuts = pieces_of(starts, max(lengths)) or (starts,)
    for cut in cuts:
        longest = int(cut.diff().max())
        assert longest <= max(16, 512)
        sums = torch.cat([values.new_zeros(1), values.cumsum(0)])
        values = sums[cut[1:].long()] - sums[cut[:-1].long()]
    first = torch.arange(sum(lengths), dtype=torch.float64) + 1
    want = torch.stack([part.sum() for part in first.split(lengths)])
    assert torch.equal(values, want)


def test_the_same_bits_under_every_schedule(kernel_lane):
    runs = [run(kernel_lane, [30, 70, 200], c_out=33, bias=True)[0] for _ in schedules(kernel_lane)]
    assert all(torch.equal(runs[0], other) for other in runs[1:])
