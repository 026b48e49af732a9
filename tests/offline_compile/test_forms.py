"""The list of kernel forms: complete, and what is compiled of it meets every level."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from sparse_bridge.kernels.runtime import target as targets
from sparse_bridge.kernels.runtime.architectures import compiled

pytest.importorskip("triton")
from sparse_bridge.kernels.runtime.launch import REGISTRY, Kernel
from sparse_bridge.kernels.tiles.candidates import DIRECTIONS, candidates
from sparse_bridge.kernels.tiles.clamps import clamp_for_problem, clamp_for_registers
from sparse_bridge.kernels.tiles.tile import GemmSize, TileConfig
from sparse_bridge.kernels.tiles.tile_config import gather_tile, ways, wgrad_tile
from sparse_bridge.tools.offline_compile import forms_gemm
from sparse_bridge.tools.offline_compile.catalogue import covering, launchable, spaces
from sparse_bridge.tools.offline_compile.forms import as_launched, make
from tests.quick import quick

EVERY = (*compiled(), "gfx908", "sm_130", "sm_110")
channels = st.integers(1, 1100) | st.sampled_from((256, 512, 768, 1024, 2048, 4096))


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100", "sm_75", "sm_90"])
def test_every_kernel_is_declared(arch):
    assert set(spaces(targets.described(arch))) == set(REGISTRY)


@pytest.mark.slow
@given(
    st.sampled_from(EVERY),
    st.sampled_from(range(4)),
    channels,
    channels,
    st.integers(1, 10**7),
    st.integers(1, 343),
    st.sampled_from(("oi", "io")),
    st.booleans(),
)
@hypothesis_settings(max_examples=150)
def test_every_tile_is_listed(arch, kind, c_in, c_out, n_rows, n_offsets, order, grows):
    """Whatever the channels, rows, offsets, layout and kind of map: the tile that is chosen, and
    every candidate."""
    target = targets.described(arch)
    products = forms_gemm.products(target)
    dtype, precision = products[kind % len(products)]
    listed = {
        c.tile
        for cases in forms_gemm.gather_tiles(target)
        for c in cases
        if (c.dtype, c.precision) == (dtype, precision)
    }
    size = GemmSize(n_rows, c_in, c_out, n_offsets)
    chosen = gather_tile(target, dtype, size, precision)
    found = candidates(target, dtype, size, precision, "fwd")
    assert found[0] == chosen
    chosen = gather_tile(target, dtype, size._replace(expanding=grows), precision, order)
    assert {chosen, *found} <= listed
    listed = {
        c.tile
        for cases in forms_gemm.wgrad_tiles(target)
        for c in cases
        if (c.dtype, c.precision) == (dtype, precision)
    }
    found = candidates(target, dtype, size, precision, "wgrad")
    assert found[0] == wgrad_tile(target, dtype, c_in, c_out, precision)
    assert set(found) <= listed


@pytest.mark.parametrize("arch", EVERY)
def test_what_a_tile_does_not_depend_on(arch):
    """The list leaves out what `ways` says makes no difference."""
    target = targets.described(arch)
    sizes = (16, 64, 96, 128, 160, 256, 384, 512, 1024)
    rows = [most * target.compute_units for most in (1, 16, 128, 512, 2048)]
    for (dtype, precision), *where in itertools.product(forms_gemm.products(target), rows, sizes, sizes):
        queued, roomy = ways(target, dtype, precision)
        found = {
            (order, v, grows): gather_tile(target, dtype, GemmSize(*where, v, grows), precision, order)
            for order in ("oi", "io")
            for v in (8, 27)
            for grows in (False, True)
        }
        for (order, v, grows), tile in found.items():
            same = order if roomy else "oi", v if roomy or queued else 27, grows and queued
            assert tile == found[same]


@pytest.mark.parametrize("arch", EVERY)
def test_candidates_fit_their_target(arch):
    target = targets.described(arch)
    for dtype, precision in forms_gemm.products(target):
        for direction in DIRECTIONS:
            tiles = candidates(target, dtype, GemmSize(1 << 17, 64, 96, 27), precision, direction)
            assert 1 <= len(tiles) <= 12 and len(set(tiles)) == len(tiles)
            for tile in tiles:
                assert tile.shared_bytes(dtype.itemsize) <= target.shared_memory
                assert min(tile.block_m, tile.block_n, tile.block_k) >= 16
                assert not tile.vendor or target.backend == "hip"
                if direction != "wgrad":
                    assert tile.block_m in (64, 128), "rows of a packed tile"


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950", "gfx1100"])
def test_crowded_waves_keep_their_registers(arch):
    """128 x 128 results in 4 waves of 64 lanes leave no room for a second wave."""
    target, seen = targets.described(arch), 0
    for c_in, c_out in itertools.product((16, 64, 128), (64, 128)):
        for tile in candidates(target, torch.float16, GemmSize(1 << 17, c_in, c_out, 27), "ieee", "fwd"):
            if dict(tile.vendor).get("waves_per_eu"):
                seen += 1
                assert tile.block_m * tile.block_n <= 32 * tile.num_warps * target.warp_size
    assert seen > 0


def test_candidates_refuse_what_is_no_direction():
    with pytest.raises(ValueError, match="'up'; expected one of"):
        candidates(targets.described("sm_90"), torch.float16, GemmSize(1 << 17, 16, 16, 27), "ieee", "up")


@pytest.mark.parametrize("arch", ["gfx942", "sm_75"])
def test_what_is_compiled_meets_every_level(arch):
    """Every level of every constant, every tile with every dtype; all of them can be launched."""
    target = targets.described(arch)
    compiled = covering(target)
    assert len(compiled) == len(set(compiled))
    for name, declared in spaces(target).items():
        found = [form for form in compiled if form.kernel == name]
        for space in (one for one in declared if all(one.factors.values())):
            for factor, levels in space.factors.items():
                first = {n: side[0] for n, side in space.factors.items()}
                for level in levels:
                    one = space.build(**{**first, factor: level})
                    if factor == space.main:
                        assert any(form.tile == one.tile for form in found)
                    for name, value in one.named.items():
                        assert any(form.named[name] == value for form in found)
    some = compiled[:: len(compiled) // 12]
    assert all(launchable(target, form.launched) for form in some)


def test_an_unlisted_form_is_refused():
    target = targets.described("sm_90")
    form = next(f for f in covering(target) if f.kernel == "pool_forward").launched
    assert launchable(target, form)
    for change in (
        {"options": (("num_warps", 2),)},
        {"constants": (7, *form.constants[1:])},
        {"types": ("*i32", *form.types[1:])},
        {"kernel": "pool_sideways"},
    ):
        assert not launchable(target, dataclasses.replace(form, **change))


def test_launches_are_described_as_forms_are():
    """What a launcher passes and what its declaration says come out the same."""
    seen = []

    class Listening(Kernel):
        def launch(self, device, target, grid, args, constants, options, key):
            seen.append(as_launched(self, args, constants, options))

    from sparse_bridge.kernels.ops import pooling

    target = targets.described("gfx942")
    kernel = pooling.pool_forward_kernel
    listening = Listening(kernel.fn, kernel.constants)
    x, nbr = torch.zeros(5, 40, dtype=torch.float16), torch.zeros(27, 9, dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pooling, "pool_forward_kernel", listening)
        pooling.pool_forward(x, nbr, torch.zeros(9, 40).half(), nbr[0], "max", 0.0, target)
    assert [form.types[0] for form in seen] == ["*fp16"] and launchable(target, seen[0])


def test_declarations_name_arguments_that_exist():
    kernel = REGISTRY["pool_forward"]
    with pytest.raises(TypeError, match=r"'z': 'fp16'"):
        make(kernel, (0, 32, 16), {"num_warps": 4}, z="fp16")
    with pytest.raises(TypeError, match="pool_forward takes"):
        make(kernel, (0, 32), {"num_warps": 4})


def test_all_forms_of_a_small_kernel():
    target = targets.described("sm_90")
    forms = [form for space in spaces(target)["pack_tiles"] for form in space.all()]
    assert {form.types[2] for form in forms} == {"*i32", "*i64"} and len(set(forms)) == len(forms)


def test_tiles_of_the_default_choice_come_first():
    target = targets.described("gfx942")
    default, tuned = forms_gemm.gather_tiles(target)
    assert not set(default) & set(tuned)
    assert all(isinstance(case.tile, TileConfig) for case in (*default, *tuned))
    assert any(case.tile.vendor for case in tuned) and not any(c.tile.vendor for c in default)


@pytest.mark.parametrize(
    "arch, dtype, precision, c_in, wide, epilogue, depth",
    [
        ("sm_90", torch.float32, "ieee", 64, False, 7, 32),
        ("sm_90", torch.float32, "ieee", 64, False, 2, 32),
        ("sm_90", torch.float32, "ieee", 64, False, 1, 64),
        ("sm_90", torch.float32, "tf32", 64, False, 7, 64),
        ("sm_90", torch.float16, "ieee", 64, False, 7, 64),
        ("gfx942", torch.float32, "ieee", 64, False, 7, 64),
        ("gfx942", torch.float16, "ieee", 40, False, 0, 64),
        ("gfx942", torch.float16, "ieee", 40, True, 0, 32),
        ("gfx942", torch.float16, "ieee", 128, True, 0, 64),
        ("sm_80", torch.float32, "tf32", 64, True, 0, 64),
    ],
)
def test_what_does_not_fit_with_64_channels(arch, dtype, precision, c_in, wide, epilogue, depth):
    tile, target = TileConfig(64, 64, 64, 4, 2), targets.described(arch)
    found = clamp_for_problem(tile, target, dtype, precision, c_in, wide, epilogue)
    assert found == dataclasses.replace(tile, block_k=depth)


def test_fewer_results_under_wide_offsets():
    tile, hopper = TileConfig(128, 256, 64, 8, 2), targets.described("sm_90")
    assert clamp_for_problem(tile, hopper, torch.float16, "ieee", 64, False, 0) == tile
    for dtype, columns in ((torch.float16, 128), (torch.float32, 64)):
        found = clamp_for_problem(tile, hopper, dtype, "ieee", 64, True, 0)
        assert found == dataclasses.replace(tile, block_n=columns)


@pytest.mark.parametrize(
    "arch, tile, dtype, precision, epilogue, found",
    [
        ("sm_100", (64, 64, 32, 4, 3), torch.float16, "ieee", 7, (64, 64, 32, 8, 3)),
        ("sm_100", (64, 128, 64, 8, 2), torch.float16, "ieee", 2, (64, 64, 64, 8, 2)),
        ("sm_100", (128, 64, 64, 4, 2), torch.bfloat16, "ieee", 3, (128, 32, 64, 8, 2)),
        ("sm_100", (64, 64, 32, 4, 2), torch.float32, "tf32", 6, (64, 64, 32, 8, 2)),
        ("sm_100", (64, 16, 64, 4, 2), torch.float16, "ieee", 7, (64, 16, 64, 4, 2)),
        ("sm_100", (64, 128, 64, 8, 2), torch.float16, "ieee", 1, (64, 128, 64, 8, 2)),
        ("sm_100", (64, 64, 32, 4, 2), torch.float32, "ieee", 7, (64, 64, 32, 4, 2)),
        ("sm_120", (64, 128, 64, 4, 2), torch.float16, "ieee", 7, (64, 128, 64, 4, 2)),
    ],
)
def test_a_norm_behind_tensor_memory(arch, tile, dtype, precision, epilogue, found):
    """A thread holds whole rows, with a scale and a shift for each column."""
    target = targets.described(arch)
    tile = TileConfig(*tile)
    clamped = clamp_for_problem(tile, target, dtype, precision, 64, False, epilogue)
    assert clamped == TileConfig(*found)


def test_fewer_results_of_rows_in_tensor_memory():
    large = TileConfig(128, 256, 64, 8, 2)
    for arch, most in (("sm_100", 32), ("sm_103", 32), ("sm_120", 64)):
        target = targets.described(arch)
        tile = clamp_for_registers(large, target, torch.float16, "ieee", wgrad=False)
        assert tile.block_m * tile.block_n == most * 8 * 32


@pytest.mark.parametrize("n_rows", [100, 10**6])
def test_two_buffers_fit_cdna4(n_rows):
    """Whatever the stages: newer Triton keeps two buffers, and pads them."""
    target = targets.described("gfx950")
    for dtype, c_in, c_out in ((torch.float16, 512, 512), (torch.float32, 256, 256)):
        for tile in candidates(target, dtype, GemmSize(n_rows, c_in, c_out, 27), "ieee", "fwd"):
            one = dataclasses.replace(tile, num_stages=2).shared_bytes(dtype.itemsize)
            assert 2 * one < target.shared_memory * 16 / 17


@pytest.mark.sample(1)
@pytest.mark.parametrize("arch", quick(["sm_80"], ["sm_80", "sm_90", "sm_100"]))
def test_what_is_compiled_can_be_launched(arch):
    """Also where offsets or a norm make a tile smaller."""
    target = targets.described(arch)
    products = [form for form in covering(target) if form.kernel == "gather_gemm"]
    assert len(products) > 100
    assert [form for form in products if not launchable(target, form.launched)] == []


@pytest.mark.parametrize("wgrad", [False, True])
def test_tiles_stay_in_registers(wgrad):
    """fp32 without matrix instructions: shallower, more warps, then fewer rows or columns."""
    large = TileConfig(128, 128, 64, 4, 3)
    rdna, cdna = targets.described("gfx1100"), targets.described("gfx90a")
    tile = clamp_for_registers(large, rdna, torch.float32, "ieee", wgrad)
    assert tile.block_m * tile.block_n <= 16 * 8 * 32 and (tile.block_k, tile.num_stages) == (16, 2)
    assert tile.block_m in ((32,) if wgrad else (64, 128)) and tile.num_warps == 8
    assert clamp_for_registers(large, cdna, torch.float32, "ieee", wgrad) == large
    half = clamp_for_registers(large, targets.described("sm_75"), torch.float16, "ieee", wgrad)
    assert half.block_k == 16, "Turing's matrix units are idle"
