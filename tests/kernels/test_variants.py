"""The list of kernel forms: complete, and what is compiled of it meets every level."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from sparse_bridge.gate.architectures import ARCHITECTURES
from sparse_bridge.kernels import target as targets

pytest.importorskip("triton")
from sparse_bridge.kernels import variants_gemm
from sparse_bridge.kernels.launch import REGISTRY, Kernel
from sparse_bridge.kernels.tile_candidates import DIRECTIONS, FAMILIES, candidates
from sparse_bridge.kernels.tile_config import TileConfig, gather_tile, wgrad_tile
from sparse_bridge.kernels.variants import (
    as_launched, covering, declarations, launchable, make, spaces, variants,
)  # fmt: skip

EVERY = (*ARCHITECTURES, "gfx908", "sm_130", "sm_121")
channels = st.integers(1, 1100) | st.sampled_from((256, 512, 768, 1024, 2048, 4096))


def whole(tile):
    return dataclasses.replace(tile, split_k=1)


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100", "sm_75", "sm_90"])
def test_every_kernel_is_declared(arch):
    declarations()
    assert set(spaces(targets.described(arch))) == set(REGISTRY)


@given(
    st.sampled_from(EVERY), st.sampled_from(range(4)), channels, channels, st.integers(1, 10**7),
    st.integers(1, 343), st.integers(1, 300),
)  # fmt: skip
@hypothesis_settings(max_examples=300, deadline=None)
def test_every_tile_is_listed(arch, kind, c_in, c_out, n_rows, n_offsets, units):
    """Whatever the channels, rows and offsets: the tile that is chosen, and every candidate."""
    target = targets.described(arch, units)
    products = variants_gemm.products(target)
    dtype, precision = products[kind % len(products)]
    listed = {c.tile for cases in variants_gemm.gather_tiles(target) for c in cases
              if (c.dtype, c.precision) == (dtype, precision)}  # fmt: skip
    sizes = (c_in, c_out, n_offsets, precision)
    chosen = gather_tile(target, dtype, n_rows, *sizes)
    found = candidates(target, dtype, *sizes, "fwd", n_rows)
    assert found[0] == chosen
    assert {whole(tile) for tile in found} <= listed
    assert {tile.split_k for tile in found} <= {1, *variants_gemm.SPLITS}
    listed = {c.tile for cases in variants_gemm.wgrad_tiles(target) for c in cases
              if (c.dtype, c.precision) == (dtype, precision)}  # fmt: skip
    found = candidates(target, dtype, *sizes, "wgrad", n_rows)
    assert found[0] == wgrad_tile(target, dtype, c_in, c_out, precision)
    assert set(found) <= listed


@pytest.mark.parametrize("arch", EVERY)
def test_candidates_fit_their_target(arch):
    target = targets.described(arch)
    for dtype, precision in variants_gemm.products(target):
        for direction in DIRECTIONS:
            tiles = candidates(target, dtype, 64, 96, 27, precision, direction)
            assert 2 <= len(tiles) <= 12 and len(set(tiles)) == len(tiles)
            for tile in tiles:
                assert tile.shared_bytes(dtype.itemsize) <= target.shared_memory
                assert min(tile.block_m, tile.block_n, tile.block_k) >= 16
                assert not tile.vendor or target.vendor == "amd"
                if direction != "wgrad":
                    assert tile.block_m in (64, 128), "rows of a packed tile"


def test_candidates_refuse_what_is_no_direction():
    with pytest.raises(ValueError, match="'up'; expected one of"):
        candidates(targets.described("sm_90"), torch.float16, 16, 16, 27, "ieee", "up")


def test_every_family_has_candidates():
    families = {targets.described(arch).family for arch in EVERY}
    assert families <= set(FAMILIES) and "generic" in families


@pytest.mark.parametrize("arch", ["gfx942", "sm_80"])
def test_what_is_compiled_meets_every_level(arch):
    """Every level of every factor, every tile with every dtype; no form twice; all of them forms
    that can be launched."""
    target = targets.described(arch)
    compiled = covering(target)
    assert len(compiled) == len(set(compiled))
    for name, declared in spaces(target).items():
        forms = {form.launched for form in compiled if form.kernel == name}
        for place in range(len(REGISTRY[name].constants)):
            every = {
                level
                for space in declared
                for case in space.covering()
                for level in [case.constants[place]]
            }
            assert {form.constants[place] for form in forms} == every
        for space in declared:
            if space.main:
                cases = {(form.tile, form.types[0]) for form in space.covering()}
                assert len(cases) >= len(space.factors[space.main]) / 2
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
    declarations()
    seen = []

    class Listening(Kernel):
        def launch(self, device, target, grid, args, constants, options, key):
            seen.append(as_launched(self, args, constants, options))

    from sparse_bridge.kernels import pooling

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
    forms = [form for form in variants(target) if form.kernel == "pack_tiles"]
    assert {form.types[2] for form in forms} == {"*i32", "*i64"} and len(set(forms)) == len(forms)


def test_tiles_of_the_default_choice_come_first():
    target = targets.described("gfx942")
    default, tuned = variants_gemm.gather_tiles(target)
    assert not set(default) & set(tuned)
    assert all(isinstance(case.tile, TileConfig) for case in (*default, *tuned))
    assert any(case.tile.vendor for case in tuned) and not any(c.tile.vendor for c in default)
