"""The records of GPU generations: complete, unambiguous, and all that a new one needs."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from sparse_bridge.core.device.precision import product_precision, reads_rows
from sparse_bridge.core.geometry.weights import WeightLayout
from sparse_bridge.errors import DeviceError
from sparse_bridge.kernels.runtime import architectures
from sparse_bridge.kernels.runtime.architectures import GENERATIONS
from sparse_bridge.kernels.runtime.generation import Candidates, Chip, Generation, RegisterLimits
from sparse_bridge.kernels.runtime.target import described
from sparse_bridge.kernels.tiles.candidates import candidates
from sparse_bridge.kernels.tiles.tile import GemmSize, TileConfig
from sparse_bridge.kernels.tiles.tile_config import gather_tile
from sparse_bridge.tools.offline_compile import catalogue, checks, forms_gemm, running
from tests.releases import triton_since

MINE = ((64, 32, 32, 2, 3),)
INVENTED = Generation(
    "rubin",
    "cuda",
    r"sm_14\d",
    warp_size=32,
    bf16=False,
    tf32=True,
    matrix=("MMA",),
    matrix_types=("fp16", "tf32"),
    chips={"sm_140": Chip(512, "R100", splits_fp32=True)},
    limits=RegisterLimits(),
    candidates=Candidates(MINE, MINE, MINE, MINE),
    wide_turned=(128, 64, 64, 16, 5),
    tf32_reads_rows=True,
)


@pytest.fixture
def invented(monkeypatch):
    """The target of a GPU that one more record describes."""
    monkeypatch.setattr(architectures, "GENERATIONS", (INVENTED, *GENERATIONS))
    forms_gemm.gather_tiles.cache_clear()
    yield described("sm_140")
    for cached in (forms_gemm.gather_tiles, forms_gemm.wgrad_tiles, catalogue.spaces):
        cached.cache_clear()


def test_a_record_is_all_that_a_new_generation_needs(invented):
    assert (invented.family, invented.shared_memory) == ("rubin", 512 << 10)
    assert not invented.has_bf16 and invented.has_tf32 and invented.splits_fp32
    assert invented.has_matrix_units and invented.takes_addresses is False
    assert described("sm_149").family == "rubin" and described("sm_150").family == "generic"


def test_precision_and_layout_follow_the_record(invented):
    single = torch.float32
    assert product_precision(invented, single, "tf32") == "tf32"
    assert product_precision(invented, single, "ieee") == "tf32x3"
    columns_first = WeightLayout((64 * 64, 64, 1, 0), 0, 27, 64, 64, 1)
    assert reads_rows(invented, "tf32", columns_first)
    assert not reads_rows(described("sm_150"), "tf32", columns_first)


def test_tiles_follow_the_record(invented):
    wide = (torch.float16, GemmSize(1 << 20, 256, 256, 27), "ieee")
    assert gather_tile(invented, *wide, "oi") == TileConfig(128, 256, 128, 8, 2)
    assert gather_tile(invented, *wide, "io") == TileConfig(128, 64, 64, 16, 5)
    for direction in ("fwd", "wgrad"):
        tiles = candidates(invented, torch.float16, GemmSize(1 << 17, 64, 64, 27), "ieee", direction)
        assert TileConfig(*MINE[0]) in tiles


def test_the_gate_lists_it(invented):
    assert next(iter(architectures.compiled().items())) == ("sm_140", "R100")
    products = {checks.product_of(form) for form in catalogue.covering(invented)} - {None}
    assert products == {"fp16", "fp32", "tf32", "tf32x3"}
    (case,) = [
        form
        for form in catalogue.covering(invented)
        if form.kernel == "wgrad_gemm" and checks.product_of(form) == "fp16" and dict(form.options)["num_warps"] == 2
    ][:1]
    assert checks.expected_matrix(case, invented) == ("MMA",)


def test_one_record_answers_for_every_name():
    """Names that are compiled for belong to one record, and no pattern hides another."""
    for arch in architectures.compiled():
        mine = [one for one in GENERATIONS if re.fullmatch(one.names, arch) and arch in one.chips]
        assert len(mine) == 1 and architectures.generation_of(mine[0].backend, arch) is mine[0]
    for one, arch in itertools.chain(*([(g, a) for a in g.chips] for g in GENERATIONS)):
        assert architectures.generation_of(one.backend, arch) is one


def test_features_in_the_name_of_a_gpu():
    assert architectures.generation_of("hip", "gfx942:sramecc+:xnack-").family == "cdna3"


def test_tiles_of_every_record_can_be_clipped_and_run():
    for one in GENERATIONS:
        tiles = one.candidates
        for shape in (*tiles.gather_half, *tiles.gather_single, one.wide, one.wide_turned):
            assert shape[0] in (64, 128), "rows of a packed tile"
        for options in (*tiles.options_half, *tiles.options_single):
            assert {name for name, _ in options} <= one.options


@triton_since(3, 5, "the compile check does not run")
def test_the_gate_refuses_what_is_no_architecture():
    if torch.cuda.is_available():
        pytest.skip("the plain lane is enough")
    with pytest.raises(DeviceError, match="expected a name like"):
        running.jobs_for(["sm_140x"], full=False)
