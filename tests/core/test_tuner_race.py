"""What a tile must show before it wins: right results, in bounded time. Times are invented."""

from __future__ import annotations

import threading

import pytest
import torch

from sparse_bridge.core.tuning import tuner
from sparse_bridge.core.tuning.trial import mismatch
from sparse_bridge.core.tuning.tuner import BUDGET, Tuner
from tests.core.tuning import Work, blocking, fastest, here, never, problem, tuning
from tests.patience import PATIENCE

pytest.importorskip("triton")


def test_a_gain_within_the_noise_keeps_the_default(tmp_path):
    one, work = problem(), Work()
    work.speed[fastest(one, work)] = 0.98e-3
    with tuning("full", tmp_path):
        assert blocking(work).tile_for(one, work.trial()) == one.default()
        assert len(work.timed) > 2
        assert Tuner(never).tile_for(one, Work().trial()) == one.default(), "settled for good"


def wrong_element(result):
    result[3, 5] += 1.0


def shifted(result):
    result += 0.02


def unwritten(result):
    result[7] = float("nan")


def overflown(result):
    result[0, 0] = float("inf")


def crash(result):
    raise RuntimeError("out of resources: shared memory")


@pytest.mark.parametrize("fault", [wrong_element, shifted, unwritten, overflown, crash])
def test_a_wrong_candidate_never_wins(tmp_path, fault):
    one, work = problem(), Work()
    wrong, right = fastest(one, work, 1), fastest(one, work, 2)
    work.speed = {wrong: 1e-6, right: 1e-4}
    work.faults[wrong] = fault
    with tuning("full", tmp_path):
        found = blocking(work)
        assert found.tile_for(one, work.trial()) == right
    assert wrong not in work.timed
    (result,) = found.results
    assert list(result.refused) == [wrong] and result.refused[wrong]


@pytest.mark.parametrize("direction", ["fwd", "dgrad", "wgrad"])
def test_rounding_is_a_fault_but_in_sums_over_rows(tmp_path, direction):
    one, work = problem(direction), Work()
    best = fastest(one, work)
    work.faults[best] = lambda result: result.mul_(1 + 1e-3)
    with tuning("full", tmp_path):
        taken = blocking(work).tile_for(one, work.trial())
    assert (taken == best) == (direction == "wgrad")


@pytest.mark.parametrize(
    "dtype, precision, error, right",
    [
        (torch.float16, "ieee", 5e-3, True),
        (torch.float16, "ieee", 5e-2, False),
        (torch.bfloat16, "ieee", 5e-2, True),
        (torch.bfloat16, "ieee", 1e-1, False),
        (torch.float32, "tf32", 5e-3, True),
        (torch.float32, "tf32", 5e-2, False),
        (torch.float32, "ieee", 5e-5, True),
        (torch.float32, "ieee", 5e-4, False),
    ],
)
def test_limits_of_the_guard(dtype, precision, error, right):
    reference = torch.randn(300, 16)
    reference /= reference.square().mean().sqrt()
    result = reference.clone()
    result[299, 15] += error
    assert (mismatch(result, reference, dtype, precision, exact=False) is None) == right
    assert "1 elements have other bits" in mismatch(result, reference, dtype, precision, exact=True)


@pytest.mark.parametrize("exact", [True, False])
def test_the_guard_compares_what_is_not_finite(exact):
    reference = torch.tensor([1.0, float("inf"), float("nan"), -2.0])
    assert mismatch(reference.clone(), reference, torch.float16, "ieee", exact) is None
    for place in range(4):
        other = reference.clone()
        other[place] = -float("inf")
        assert mismatch(other, reference, torch.float16, "ieee", exact)


class Changing(Work):
    """Gives another result every time."""

    def _build(self, tile):
        plan = super()._build(tile)

        def changing(value, result):
            plan(value + len(self.ran), result)

        return changing


@pytest.mark.parametrize(
    "work",
    [Work(value=torch.zeros(40, 64)), Work(value=torch.full((40, 64), float("nan"))), Changing()],
    ids=["zero", "nan", "changing"],
)
def test_nothing_is_learnt_where_the_reference_proves_nothing(tmp_path, work):
    one = problem()
    fastest(one, work)
    with tuning("full", tmp_path):
        found = blocking(work)
        assert found.tile_for(one, work.trial()) == one.default()
    assert "proves nothing" in found.results[0].why
    assert not work.timed and not any(here(tmp_path).load().values())


def test_a_default_tile_that_leaves_holes_is_no_reference(tmp_path):
    one, work = problem(), Work()
    fastest(one, work)

    def holes(tile_of):
        def plan(value, result):
            result[1:] = value[1:]

        return plan

    work._build = holes
    with tuning("full", tmp_path):
        assert blocking(work).tile_for(one, work.trial()) == one.default()
    assert not work.timed


def test_the_time_of_a_bucket_is_bounded(tmp_path):
    one, now = problem(c=256), [0.0]

    class Slow(Work):
        def timer(self, run, limit):
            assert limit <= BUDGET
            now[0] += limit
            return super().timer(run, limit)

    work = Slow()
    last = fastest(one, work, tuner.COUNT - 1)
    with tuning("full", tmp_path):
        found = blocking(work, clock=lambda: now[0])
        assert found.tile_for(one, work.trial()) == last
        assert now[0] <= BUDGET
    now[0], hurried, run = 0.0, Slow(), 0.03
    fastest(one, hurried, tuner.COUNT - 1)
    build = hurried._build

    def crawling(tile_of):
        plan = build(tile_of)

        def crawl(*arguments):
            now[0] += run
            plan(*arguments)

        return crawl

    hurried._build = crawling
    with tuning("full", tmp_path / "other"):
        found = Tuner(hurried.timer, clock=lambda: now[0])
        found.tile_for(one, hurried.trial())
        assert found.compiler.wait(one.bucket(), 30)
        now[0] = 0.0
        found.tile_for(one, hurried.trial())
        assert 0 < now[0] <= BUDGET + 2 * run and 1 < len(set(hurried.timed)) < tuner.COUNT
        spent = now[0]
        for rows in range(90_000, 90_010):
            found.tile_for(problem(n_rows=rows, c=256), hurried.trial())
        assert now[0] == spent, "a bucket is paid for once"
        found.compiler.close()


def test_compiling_goes_on_beside_the_program(tmp_path):
    one, work = problem(c=256), Work()
    best = fastest(one, work)
    threads, gate = set(), threading.Event()
    build = work._build

    def watched(tile_of):
        plan = build(tile_of)

        def run(*arguments):
            threads.add(threading.current_thread())
            if threading.current_thread() is not threading.main_thread():
                assert gate.wait(PATIENCE)
            plan(*arguments)

        return run

    work._build = watched
    with tuning("full", tmp_path):
        found = Tuner(work.timer)
        for _ in range(3):
            assert found.tile_for(one, work.trial()) == one.default()
        assert threading.main_thread() not in threads and not work.timed
        gate.set()
        assert found.compiler.wait(one.bucket(), 30)
        compiled = list(work.ran)
        assert len(compiled) == len(set(compiled)) == tuner.COUNT
        assert found.tile_for(one, work.trial()) == best
        assert set(work.timed) == set(compiled)
        found.compiler.close()


def test_a_candidate_that_does_not_compile_is_survived(tmp_path):
    one, work = problem(), Work()
    wrong, right = fastest(one, work, 1), fastest(one, work, 2)
    work.faults[wrong] = crash
    with tuning("full", tmp_path):
        found = Tuner(work.timer)
        assert found.tile_for(one, work.trial()) == one.default()
        assert found.compiler.wait(one.bucket(), 30)
        assert found.tile_for(one, work.trial()) == right
        found.compiler.close()


def test_no_memory_to_tune(tmp_path):
    one, work = problem(), Work()
    fastest(one, work)

    def out_of_memory(result):
        raise torch.cuda.OutOfMemoryError("out of memory")

    with tuning("full", tmp_path):
        found = Tuner(work.timer)
        assert found.tile_for(one, work.trial()) == one.default()
        assert found.compiler.wait(one.bucket(), 30)
        work.faults[one.default()] = out_of_memory
        assert found.tile_for(one, work.trial()) == one.default()
        found.compiler.close()
    assert not any(here(tmp_path).load().values())
