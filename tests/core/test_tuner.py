"""Choosing tiles: precedence, buckets, processes, devices. Times are invented."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from sparse_bridge import log, memory_limit
from sparse_bridge.core import functional
from sparse_bridge.core.geometry.weights import layout_of
from sparse_bridge.core.tuning import tuner
from sparse_bridge.core.tuning.problem import gather_problem
from sparse_bridge.core.tuning.trial import device_timer
from sparse_bridge.core.tuning.tune_cache import Stamp, encode
from sparse_bridge.core.tuning.tuner import Tuner
from sparse_bridge.errors import SettingError
from sparse_bridge.kernels.gemm.product import Product
from sparse_bridge.kernels.runtime.target import described
from tests.checks import assert_close
from tests.core.layers import check, layer
from tests.core.tuning import (
    H200,
    Work,
    blocking,
    fastest,
    fork,
    here,
    kill,
    needs_fork,
    never,
    problem,
    tile,
    tuning,
    winner,
)
from tests.patience import PATIENCE

pytest.importorskip("triton")


def test_off_is_the_default_tile(tmp_path):
    one = problem()
    here(tmp_path).store("fwd", str(one.bucket()), winner(block_n=32))
    with tuning("off", tmp_path):
        assert Tuner(never).tile_for(one, Work().trial()) == one.default()


def test_cached_takes_winners_and_never_times(tmp_path):
    one = problem()
    with tuning("cached", tmp_path):
        assert Tuner(never).tile_for(one, Work().trial()) == one.default()
        assert not list(tmp_path.glob("*.json")), "and stores nothing"
        here(tmp_path).store("fwd", str(one.bucket()), winner(block_n=32))
        assert Tuner(never).tile_for(one, Work().trial()) == tile(block_n=32)
        assert Tuner(never).tile_for(problem("dgrad")) == problem("dgrad").default()
        assert Tuner(never).tile_for(problem("wgrad")) == problem("wgrad").default()


def test_disk_before_shipped_before_default(tmp_path):
    one, place = problem(), tmp_path / "disk"
    stamp = Stamp.of(one.device, one.target)
    near = problem(n_rows=2 * one.n_rows)
    assert near.bucket() in one.bucket().neighbours()
    with tuning("cached", place):
        here(place).store("fwd", str(near.bucket()), winner(block_n=16))
        assert Tuner(never).tile_for(one) == tile(block_n=16), "the bucket next api"
        far = problem(n_rows=16 * one.n_rows)
        assert Tuner(never).tile_for(far) == far.default()
        text = encode(stamp, {"fwd": {str(one.bucket()): winner(block_n=32)}})
        (place / "shipped").mkdir()
        (place / "shipped" / "sm_90.json").write_text(text)
        assert Tuner(never).tile_for(one) == tile(block_n=32)
        here(place).store("fwd", str(one.bucket()), winner(block_n=128))
        assert Tuner(never).tile_for(one) == tile(block_n=128)


def test_a_stored_tile_that_cannot_run_here_is_ignored(tmp_path):
    one = problem()
    for sizes in ({"block_m": 256}, {"block_m": 128, "block_n": 1024, "block_k": 512}):
        here(tmp_path).store("fwd", str(one.bucket()), winner(**sizes))
        with tuning("cached", tmp_path):
            assert Tuner(never).tile_for(one) == one.default()


def test_a_stored_tile_that_gives_other_bits_is_ignored():
    """Another matrix instruction; another order of three products."""
    one, amd = problem(), problem(target=described("gfx942"))
    split = one._replace(dtype=torch.float32, precision="tf32x3")
    assert one.allows(tile(16, 16, 16)) and amd.allows(tile(64, 32, 16))
    assert not amd.allows(tile(block_m=32)) and not amd.allows(tile(block_n=16))
    assert split.allows(tile(16, 16, 64)) and not split.allows(tile(block_k=32))


def test_pinned_reads_one_file_and_writes_nothing(tmp_path, caplog):
    one, place = problem(), tmp_path / "disk"
    here(place).store("fwd", str(one.bucket()), winner(block_n=32))
    files = sorted(place.rglob("*"))
    log.reset()
    with tuning("pinned", place), caplog.at_level("WARNING", "sparse_bridge"):
        for _ in range(2):
            assert Tuner(never).tile_for(one, Work().trial()) == one.default()
    (said,) = [record.message for record in caplog.records if "TUNE=pinned" in record.message]
    assert "tiles are chosen by rule" in said
    path = tmp_path / "mine.json"
    stamp = Stamp.of(one.device, one.target)
    path.write_text(encode(stamp, {"fwd": {str(one.bucket()): winner(block_n=16)}}))
    with tuning("pinned", place, tune_file=path):
        found = Tuner(never)
        assert found.tile_for(one, Work().trial()) == tile(block_n=16)
        unseen = problem(c=48)
        assert found.tile_for(unseen, Work().trial()) == unseen.default()
    gone = tmp_path / "gone.json"
    with tuning("pinned", place, tune_file=gone), pytest.raises(SettingError, match="TUNE=pinned:FILE"):
        Tuner(never).tile_for(one)
    assert sorted(place.rglob("*")) == files


@pytest.mark.parametrize("direction", ["fwd", "dgrad", "wgrad"])
def test_full_finds_the_fastest_and_stores_it(tmp_path, direction):
    one, work = problem(direction), Work()
    best = fastest(one, work)
    with tuning("full", tmp_path):
        found = blocking(work)
        assert found.tile_for(one, work.trial()) == best
        assert work.timed[0] == one.default() and len(set(work.timed)) <= tuner.COUNT
        assert Tuner(never).tile_for(one, Work().trial()) == best, "the next process knows"
    stored = here(tmp_path).load()
    assert [name for name in stored if stored[name]] == [direction]
    (kept,) = stored[direction].values()
    assert (kept.tile, kept.microseconds, kept.default_microseconds) == (best, 100.0, 1000.0)
    assert kept.tested == len(set(work.timed))


def test_a_new_number_of_rows_never_tunes_its_bucket_again(tmp_path):
    work = Work()
    best = fastest(problem(), work)
    units = H200.compute_units
    with tuning("full", tmp_path):
        found = blocking(work)
        assert found.tile_for(problem(), work.trial()) == best
        count = len(work.ran)
        for rows in range(512 * units, 1024 * units, 3 * units):
            assert found.tile_for(problem(n_rows=rows), work.trial()) == best
        assert len(work.ran) == count and len(found.results) == 1
        found.tile_for(problem(n_rows=1024 * units), work.trial())
        found.tile_for(problem(c=32), work.trial())
        found.tile_for(problem("dgrad"), work.trial())
        assert len(found.results) == 4


def test_buckets_tell_problems_apart():
    one = problem()
    others = [
        problem("dgrad"),
        problem("wgrad"),
        problem(c=32),
        problem(c_in=32),
        problem(c_out=32),
        problem(groups=2),
        problem(n_offsets=8),
        problem(n_in=4 * one.n_rows),
        problem(dtype=torch.bfloat16),
        problem(dtype=torch.float32),
        problem(order="oi"),
        problem(dtype=torch.float32, precision="tf32"),
        problem(dataflow="masked"),
        problem("wgrad", work=one.n_rows),
        problem("wgrad", work=20 * one.n_rows),
        problem(n_rows=1),
        problem(n_rows=10**7),
    ]
    texts = {str(p.bucket()) + p.direction for p in [one, *others]}
    assert len(texts) == len(others) + 1
    assert str(one.bucket()) == "unmasked/float16/ieee/io/c64x64/g1/v27/r10/d0"


def test_problems_of_layers():
    for weight, layout, order in ((torch.randn(27, 8, 16), "vio", "io"), (torch.randn(16, 3, 3, 3, 8), "ovi", "oi")):
        w = layout_of(weight, layout)
        product = Product(H200, torch.device("cpu"), torch.float32, "tf32", w)
        forward = gather_problem(product, "masked", 12, 10)
        assert (forward.direction, forward.order) == ("fwd", order)
        assert (forward.c_in, forward.c_out, forward.n_in, forward.n_rows) == (8, 16, 10, 12)
        back = product._replace(w=w.transposed().reversed())
        back = gather_problem(back, "masked", 12, 10)
        assert (back.direction, back.order) == ("dgrad", order[::-1])
        assert forward.precision == "tf32"
        half = product._replace(dtype=torch.float16)
        assert gather_problem(half, "masked", 12, 10).precision == "ieee"


def test_what_cannot_be_timed_is_not_tuned(tmp_path):
    one, work = problem(), Work()
    with tuning("full", tmp_path):
        assert Tuner(how="blocking").tile_for(one, work.trial()) == one.default()
        assert Tuner(work.timer, how="blocking").tile_for(one) == one.default(), "no tensors"
    assert not work.ran


def test_tuning_again_replaces_a_winner(tmp_path):
    one, work = problem(), Work()
    best = fastest(one, work)
    here(tmp_path).store("fwd", str(one.bucket()), winner(block_n=16))
    with tuning("full", tmp_path):
        assert blocking(work).tile_for(one, work.trial()) == tile(block_n=16)
        assert blocking(work, again=True).tile_for(one, work.trial()) == best
        assert Tuner(never).tile_for(one) == best


def _tune(connection, place, log):
    class Noted(Work):
        def timer(self, run, limit):
            with open(log, "a") as file:
                file.write("timed\n")
            time.sleep(0.02)
            return super().timer(run, limit)

    work = Noted()
    fastest(problem(), work)
    connection.recv()
    with tuning("full", place):
        found = blocking(work, wait=60.0)
        connection.send((found.tile_for(problem(), work.trial()), len(found.results)))


@needs_fork
def test_one_process_tunes_and_the_others_wait(tmp_path):
    log = tmp_path / "log"
    started = [fork(_tune, tmp_path, log) for _ in range(4)]
    for _, connection in started:
        connection.send("go")
    answers = []
    for child, connection in started:
        assert connection.poll(PATIENCE)
        answers.append(connection.recv())
        child.join(PATIENCE)
    assert sum(tuned for _, tuned in answers) == 1
    assert {found for found, _ in answers} == {fastest(problem(), Work())}
    assert len(log.read_text().split()) <= tuner.COUNT + 3


def _hold(connection, place):
    with here(place).claim("fwd", str(problem().bucket()), 1.0) as mine:
        connection.send(mine)
        time.sleep(60)


@needs_fork
def test_waiting_for_a_process_that_hangs_is_bounded(tmp_path):
    child, connection = fork(_hold, tmp_path)
    try:
        assert connection.poll(PATIENCE) and connection.recv() is True
        work = Work()
        fastest(problem(), work)
        with tuning("full", tmp_path):
            found = blocking(work, wait=0.1)
            assert found.tile_for(problem(), work.trial()) == problem().default()
        assert not work.timed, "it waited until the other ended, and tuned"
    finally:
        kill(child)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "kind, dtype", [("submanifold", torch.float16), ("strided", torch.float32), ("inverse", torch.float16)], ids=str
)
def test_layers_are_tuned_on_their_own_inputs(kernel_lane, tmp_path, kind, dtype):
    """Real kernels: each direction finds a winner, and stays right with it in the next process."""
    made = layer(kind, 2, device=kernel_lane.device)
    order = itertools.count()

    def timer(run, limit):  # every tile is faster than the one before
        run()
        return 1e-3 * 0.5 ** next(order)

    found = Tuner(timer, how="blocking", budget=600.0, count=3)
    with tuning("full", tmp_path), tuner.use(found):
        check(made, 16, 32, kernel_lane, dtype=dtype)
    assert sorted(result.bucket.direction for result in found.results) == ["dgrad", "fwd", "wgrad"]
    winners = [result.winner for result in found.results]
    assert all(winners) and any(winner.tested > 1 for winner in winners)
    again = layer(kind, 2, device=kernel_lane.device)
    with tuning("cached", tmp_path), tuner.use(Tuner(never)):
        check(again, 16, 32, kernel_lane, dtype=dtype)
    tiles = {plan.tile for plan in again.kmap.rulebook.cache.values() if hasattr(plan, "tile")}
    assert tiles == {r.winner.tile for r in found.results if r.bucket.direction != "wgrad"}


@pytest.mark.gpu
def test_a_gpu_times_its_own_tiles(tmp_path):
    """By device events, within the budget; what is stored serves without timing."""
    coords = torch.stack(torch.meshgrid(*map(torch.arange, (1, 40, 40, 40)), indexing="ij"), -1)
    cmap = functional.coordinate_map(coords.reshape(-1, 4).int().cuda(), (40, 40, 40), 1)
    x = torch.randn(cmap.n_rows, 64, device="cuda", dtype=torch.float16, requires_grad=True)
    weight = torch.randn(27, 64, 64, device="cuda", dtype=torch.float16, requires_grad=True)

    def step():
        kmap = functional.submanifold(cmap, functional.kernel_offsets((3, 3, 3)))
        y = functional.conv(x, weight, None, kmap)
        return [y, *torch.autograd.grad(1e-3 * y.float().square().sum(), (x, weight))]

    with tuning("off", tmp_path):
        want = step()
    timed = []

    def timer(run, limit):
        timed.append(run)
        return device_timer(run, limit)

    found = Tuner(timer, how="blocking")
    with tuning("full", tmp_path), tuner.use(found):
        step()
        first = len(timed)
        step()
    assert len(timed) == first > 0, "the second map is not tuned"
    assert len(found.results) == 3
    for result in found.results:
        assert result.winner is not None, result
        assert not [why for why in result.refused.values() if why.startswith("largest error")]
        assert result.winner.microseconds <= result.winner.default_microseconds
    with tuning("cached", tmp_path), tuner.use(Tuner(never)):
        for got, expected in zip(step(), want, strict=True):
            assert_close(got, expected.double(), torch.float16)


def test_use_puts_a_tuner_in_place_for_a_while(tmp_path):
    class Fixed(Tuner):
        def tile_for(self, problem, trial=None):
            return tile(block_n=16)

    with tuning("cached", tmp_path):
        with tuner.use(Fixed()):
            assert tuner.tile_for(problem()) == tile(block_n=16)
        assert tuner.tile_for(problem()) == problem().default() != tile(block_n=16)


def test_nothing_is_timed_under_a_memory_limit(tmp_path):
    """Trials hold further results. Behind the limit the problem is tuned."""
    work = Work()
    best = fastest(problem(), work)
    with tuning("full", tmp_path):
        found = blocking(work)
        with memory_limit("1GiB"):
            assert found.tile_for(problem(), work.trial()) == problem().default()
        assert not work.ran
        assert found.tile_for(problem(), work.trial()) == best != problem().default()
