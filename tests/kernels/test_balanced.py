"""The balanced gather-GEMM against fp64, into memory full of NaN; long tiles are shared."""

from __future__ import annotations

import itertools

import pytest
import torch

from sparse_bridge.kernels.gemm import balanced_gemm
from sparse_bridge.kernels.gemm.balanced_gemm import BalancedGemm, BalancedSpec, room_for
from sparse_bridge.kernels.maps.tile_list import TILE
from sparse_bridge.kernels.runtime.scratch import Scratch, Scratches
from sparse_bridge.kernels.runtime.target import described
from sparse_bridge.kernels.tiles.tile_config import TileConfig
from tests.checks import assert_close
from tests.kernels.calls import schedules, target_of
from tests.kernels.test_gemm import NAN, run_gather

pytestmark = pytest.mark.emulated

N_IN, SMALL = 50, TileConfig(64, 16, 16, 4, 2)


def uneven(n_offsets, n_rows, long=0.2, seed=0):
    """A table whose rows have one or two offsets, but for a share of `long` that has nearly all."""
    generator = torch.Generator().manual_seed(seed)
    nbr = torch.randint(0, N_IN, (n_offsets, n_rows), generator=generator)
    chance = torch.where(torch.rand(n_rows, generator=generator) < long, 0.9, 1.5 / n_offsets)
    return torch.where(torch.rand(nbr.shape, generator=generator) < chance, nbr, -1).int()


class Shared(BalancedGemm):
    """Launches whose memory is looked at.  helpers: as many, if not as by rule."""

    __slots__ = ()
    helpers, least, used, parts = 0, 0, (), 0

    def __init__(self, spec, table, n_rows, n_in):
        super().__init__(spec, table, n_rows, n_in)
        if self.helpers or self.least:
            self._least = self.least or self._least
            self._helpers = self.helpers or self._helpers
            blocks = -(-self.spec.c_out // self.tile.block_n)
            tiles = table.pitch // self.tile.block_m
            self.grid = ((self._helpers + tiles) * blocks, self.spec.groups, 1)
            self._counts = self._helpers * blocks * self.spec.groups
            self._sums = 2 * self._counts * self.tile.block_m * self.tile.block_n
            self._numbers = (*self._numbers[:-2], self._helpers, self._least)
        lengths = table.lists(self.tile.block_m)[1].cpu()
        limit = max(self._least, -(-int(lengths.sum()) // self._helpers))
        Shared.parts = int(((lengths + limit - 1) // limit - 1).clamp(min=0).sum())

    def _memory(self):
        device = self.spec.device
        sums = torch.full((self._sums,), NAN, device=device)
        Shared.used = Scratch(sums, torch.zeros(self._counts, dtype=torch.int32, device=device))
        return self.used


@pytest.fixture
def balanced(monkeypatch):
    """run(lane, tile, **as `run_gather`): (result, truth), of launches that share tiles or not, as
    lengths say; helpers, least: in the place of the rule's numbers."""

    def run(lane, tile=SMALL, helpers=12, least=0, **kwargs):
        monkeypatch.setattr(Shared, "helpers", helpers)
        monkeypatch.setattr(Shared, "least", least)
        y, want = run_gather(lane, tile, True, kernel=(BalancedSpec, Shared), n_in=N_IN, **kwargs)
        sums, counts = Shared.used
        assert not counts.any(), "as the next launch needs them"
        assert bool(Shared.parts) == (not torch.isnan(sums).all())
        return y, want

    return run


@pytest.mark.parametrize("block_m, block_n, block_k", [(64, 16, 32), (64, 64, 16), (128, 32, 16)])
def test_tiles(kernel_lane, balanced, block_m, block_n, block_k):
    """Channels that fill the tile and such that overrun it, one column block and several."""
    tile, nbr = TileConfig(block_m, block_n, block_k, 4, 2), uneven(27, 200)
    for c_in, c_out in ((block_k, 64), (40, 70)):
        y, want = balanced(kernel_lane, tile, c_in=c_in, c_out=c_out, n_offsets=27, nbr=nbr, n=200)
        assert Shared.parts
        assert_close(y, want)


@pytest.mark.parametrize("n", [1, TILE - 1, TILE, TILE + 1, 2 * TILE, 2 * TILE + 1])
def test_rows_around_the_tile(kernel_lane, balanced, n):
    for block_m, long in itertools.product((TILE, 2 * TILE), (0.0, 1.0)):
        tile = TileConfig(block_m, 16, 16, 4, 2)
        y, want = balanced(kernel_lane, tile, nbr=uneven(27, n, long), n=n, n_offsets=27)
        assert bool(Shared.parts) >= (long == 1.0)
        assert_close(y, want)


@pytest.mark.interpreted
@pytest.mark.parametrize("helpers, least", [(1, 2), (5, 1), (30, 4)])
def test_any_number_of_helpers(kernel_lane, balanced, helpers, least):
    """Fewer than there are parts to walk make parts longer; more have nothing to do."""
    nbr = uneven(27, 200)
    y, want = balanced(
        kernel_lane, helpers=helpers, least=least, nbr=nbr, n=200, n_offsets=27, c_out=17
    )
    assert Shared.parts <= helpers
    assert_close(y, want)


@pytest.mark.interpreted
def test_no_offset_at_all(kernel_lane, balanced):
    """Every row is still written."""
    nbr = torch.full((27, 130), -1, dtype=torch.int32)
    y, want = balanced(kernel_lane, nbr=nbr, n=130, n_offsets=27, activation="relu")
    assert not Shared.parts
    assert_close(y, want.relu())


@pytest.mark.parametrize("n_offsets", [1, 8, 33, 125])
def test_kernel_volumes(kernel_lane, balanced, n_offsets):
    y, want = balanced(kernel_lane, nbr=uneven(n_offsets, 200), n=200, n_offsets=n_offsets)
    assert_close(y, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm, bias, residual, activation", [
    ("none", False, False, None), ("affine", True, True, "relu"), ("statistics", False, True, None),
])  # fmt: skip
def test_halves_and_epilogues(kernel_lane, balanced, dtype, norm, bias, residual, activation):
    if dtype == torch.bfloat16 and not target_of(kernel_lane).has_bf16:
        pytest.skip("no bf16 products here")
    y, want = balanced(
        kernel_lane, nbr=uneven(27, 200), n=200, n_offsets=27, c_out=33, dtype=dtype, norm=norm,
        bias=bias, residual=residual, activation=activation,
    )  # fmt: skip
    assert Shared.parts
    assert_close(y, want.relu() if activation else want, dtype)


@pytest.mark.interpreted
def test_sums_in_fp16_and_groups(kernel_lane, balanced):
    nbr = uneven(9, 200, 0.5)
    y, want = balanced(
        kernel_lane, nbr=nbr, n=200, n_offsets=9, least=2, dtype=torch.float16, precision="half"
    )
    assert_close(y, want, torch.float16)
    y, want = balanced(kernel_lane, nbr=nbr, n=200, n_offsets=9, least=2, groups=3, c_out=20)
    assert Shared.parts
    assert_close(y, want)


def test_the_same_bits_whoever_comes_last(kernel_lane, balanced):
    """Sums are added in the order of offsets, whatever the order of waves."""
    nbr, first = uneven(27, 200), None
    for _ in schedules(kernel_lane):
        y, want = balanced(kernel_lane, nbr=nbr, n=200, n_offsets=27)
        assert_close(y, want)
        first = y if first is None else first
        assert torch.equal(y, first)


def test_dense_scenes_are_not_shared(kernel_lane, balanced, monkeypatch):
    """Where all tiles are long and helpers few, a part would be longer than a tile."""
    y, want = balanced(kernel_lane, nbr=uneven(27, 260, 1.0), n=260, n_offsets=27, helpers=4)
    assert not Shared.parts
    assert_close(y, want)


def test_as_many_helpers_as_the_gpu_has_room_for():
    hopper = described("sm_90")
    units = hopper.compute_units
    assert room_for(hopper, TileConfig(64, 64, 64, 4, 2), 2) == 5 * units
    assert room_for(hopper, TileConfig(64, 128, 128, 4, 2), 2) == 2 * units
    assert room_for(hopper, TileConfig(128, 256, 64, 8, 3), 2) == units
    assert room_for(hopper, TileConfig(64, 16, 16, 4, 3), 2) == 8 * units


@pytest.mark.interpreted
def test_wide_offsets(kernel_lane, balanced, monkeypatch):
    monkeypatch.setattr("sparse_bridge.kernels.gemm.gather_spec.INT32_END", 1 << 10)
    y, want = balanced(kernel_lane, nbr=uneven(27, 200), n=200, n_offsets=27)
    assert Shared.parts
    assert_close(y, want)


@pytest.mark.parametrize("most", [2, 8])
def test_scratch_memory_stays_with_its_stream(monkeypatch, most):
    """A stream's own while it is among those used last; larger where more is asked for."""
    stream = [7]
    monkeypatch.setattr("sparse_bridge.kernels.runtime.scratch._STREAMS", most)
    module = balanced_gemm.scratch.__module__
    monkeypatch.setattr(f"{module}.targets.capturing", lambda device: stream[0] < 0)
    monkeypatch.setattr(f"{module}.targets.current_stream", lambda device: stream[0])
    monkeypatch.setattr(f"{module}.targets.device_index", lambda device: 0)

    class Gpu:
        type = "cuda"

    monkeypatch.setattr(f"{module}._made", lambda device, sums, counts: Scratch(
        torch.empty(sums), torch.zeros(counts, dtype=torch.int32)
    ))  # fmt: skip
    held, gpu = Scratches(), Gpu()
    first = held.of(gpu, 100, 10)
    assert held.of(gpu, 100, 10) is first and held.of(gpu, 50, 3) is first
    assert held.of(gpu, 101, 3).sums.numel() == 101
    mine = held.of(gpu, 90, 11)
    assert mine.counts.numel() == 11
    stream[0] = 8
    assert held.of(gpu, 10, 10) is not mine
    stream[0] = 7
    assert held.of(gpu, 10, 10) is mine
    stream[0] = -1
    assert held.of(gpu, 10, 10) is not held.of(gpu, 10, 10), "a graph's launches have their own"
    for stream[0] in range(100, 100 + most):
        held.of(gpu, 10, 10)
    stream[0] = 7
    assert held.of(gpu, 10, 10) is not mine, "given back"
    held.reset()
    assert held.of(gpu, 10, 10) is held.of(gpu, 1, 1)
