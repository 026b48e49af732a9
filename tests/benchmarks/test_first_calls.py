"""Dry runs of first calls without a GPU: nothing that a launch stands for, and the timeline."""

from __future__ import annotations

import pytest

from tests.adapters.spconv import apis
from tests.conftest import EMULATED, INTERPRETED

pytest.importorskip("triton")
first_calls = pytest.importorskip("benchmarks.cold.first_calls", reason="needs the emulator")
programs = pytest.importorskip("benchmarks.cold.programs", reason="needs the emulator")
timeline = pytest.importorskip("benchmarks.cold.timeline")
Step = timeline.Step
PRODUCTS = ("gather_gemm", "narrow_gemm")
pytestmark = [pytest.mark.emulated, pytest.mark.skipif(INTERPRETED or bool(EMULATED), reason="has a driver of its own")]


@pytest.mark.parametrize("channels, size", [(64, 16), (1024, 8)])
def test_no_launch_of_flex_gemm_stands(channels, size):
    """The call knows its product: few rows take other tiles."""
    found = programs.flex_gemm("sm_90", channels, size, train=True)
    assert [one.constants for one in found.late()] == []
    # What the map was first multiplied by without gradients is kept, so that pairs wait for dgrad.
    products = {*PRODUCTS, "wgrad_gemm"}
    assert [one.constants for one in found.unused() if one.name in products] == []
    kinds = {one.name for one in found.firsts()}
    assert kinds >= {"hash_insert", "pack_tiles", "gather_gemm", "wgrad_gemm", "compact_pairs"}


def test_calls_of_a_dry_run_are_counted():
    """SECOND asks for what its layers say."""
    with apis.standin():  # the wheel may be imported already
        found = programs.scenes("sm_90", "second", [3000], train=False)
    assert [(one.name, one.constants) for one in found.late()] == []
    assert len(found.firsts()) > 25
    unused = [one.name for one in found.unused()]
    # The second and third scene would use kernels that order and pack all tables of a scene, a
    # larger one another form of one of them. Backward passes would take three that list pairs, and
    # more than 16k new rows in the order of their keys one.
    assert len([name for name in unused if name not in PRODUCTS]) <= 12
    # Each of seven products in three other tiles: those of scenes of 40,000 and of 10,000 rows, and
    # of rows that larger scenes have had ordered.
    assert len([name for name in unused if name in PRODUCTS]) <= 7 * 3


@pytest.mark.slow
def test_scenes_of_other_sizes_stand_for_nothing(monkeypatch):
    """Blocks whose norms and sums nobody tells: guessed, and once known begun for other scenes."""

    def small(sp):
        return programs.ResidualUNet(sp, encoder=(32, 64), decoder=(64, 32), blocks=(1, 1))

    monkeypatch.setitem(programs.NETWORKS, "small", small)
    with apis.standin():
        found = programs.scenes("sm_90", "small", [5000, 12000, 2500, 20000], train=False)
    assert [(one.part, one.name, one.constants) for one in found.late()] == []
    products = [one for one in found.unused() if one.name in PRODUCTS]
    assert len(products) <= 2 * len(found.firsts()) // 5


def test_threads_take_what_is_handed_in_first():
    """Two threads, three forms of a second: the third begins when one is free."""
    steps = [Step(name, True, 1.0) for name in "abc"] + [Step(name, False, 1.0, name) for name in "abc"]
    assert timeline.timeline(steps, threads=2, held=0.0) == {"a": 1.0, "b": 1.0, "c": 2.0}
    assert timeline.timeline(steps, threads=3, held=0.0)["c"] == 1.0
    # The program takes what no thread has begun.
    assert timeline.timeline([steps[0], steps[2], steps[5]], threads=1, held=0.0) == {"c": 1.0}


def test_launches_that_nobody_foresaw_stand():
    steps = [Step("a", True, 1.0), Step("b", False, 2.0, "one"), Step("a", False, 1.0, "two")]
    assert timeline.timeline(steps, held=0.0) == {"one": 2.0, "two": 2.0}
    assert timeline.alone(steps) == 3.0 and timeline.alone(steps, lambda step: step.early) == 1.0


def test_the_interpreter_lock_is_held_by_one():
    steps = [Step(name, True, 1.0) for name in "abcd"] + [Step("d", False, 1.0, "d")]
    assert timeline.timeline(steps, held=0.5)["d"] == pytest.approx(2.5)
    assert timeline.timeline(steps, held=0.0)["d"] == 1.0


def test_the_table():
    row = {
        "program": "flex_gemm:64:16",
        "forms": 22,
        "late": 0,
        "unused": 12,
        "seconds": 9.5,
        "timeline": {"forward": 1.234, "backward": 2.0},
    }
    assert first_calls.line(row) == "| flex_gemm:64:16 | 22 | 0 | 12 | 9.5 | forward 1.2, backward 2.0 |"
