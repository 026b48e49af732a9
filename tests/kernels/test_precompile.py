"""Kernels compile in the background, and launches find them there."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

from sparse_bridge.kernels.runtime import launch, precompile
from sparse_bridge.kernels.runtime.target import Target
from sparse_bridge.workers import Workers
from tests.patience import PATIENCE

HOPPER = Target("cuda", "sm_90", 32, 132, 227 << 10, raw=True)
MI300 = Target("hip", "gfx942", 64, 304, 64 << 10, raw=True)
NOWHERE = Target("interpreter", "interpreter", 32, 4, 1 << 20, raw=False)


@pytest.fixture
def workers():
    made = Workers(2, "test")
    yield made
    made.close()


class TestWorkers:
    def test_results_and_errors_reach_whoever_waits(self, workers):
        def broken():
            raise ValueError("as asked")

        good, bad = workers.submit(lambda: 7), workers.submit(broken)
        assert good.result(PATIENCE) == 7
        with pytest.raises(ValueError, match="as asked"):
            bad.result(PATIENCE)

    def test_two_run_side_by_side_and_no_more(self, workers):
        meeting, names = threading.Barrier(2), set()

        def meet():
            names.add(threading.current_thread().name)
            return meeting.wait(PATIENCE)

        assert sorted(run.result(PATIENCE) for run in [workers.submit(meet) for _ in range(6)]) == [0, 0, 0, 1, 1, 1]
        assert len(names) == 2

    def test_what_comes_later_begins_when_nothing_else_waits(self, workers):
        """Also if it was submitted first; what has not begun can still be cancelled."""
        began, gate = [], threading.Event()
        held = [workers.submit(lambda: gate.wait(PATIENCE)) for _ in range(2)]
        later = [workers.submit(lambda n=n: began.append(n), later=True) for n in range(3)]
        first = [workers.submit(lambda n=n: began.append(n)) for n in range(10, 12)]
        assert later[1].cancel() and began == []
        gate.set()
        for one in (*held, *first, later[0], later[2]):
            one.result(PATIENCE)
        assert set(began[:2]) == {10, 11} and set(began[2:]) == {0, 2}

    def test_what_waits_is_dropped_at_the_end_and_what_runs_is_finished(self, workers):
        go, begun = threading.Event(), threading.Barrier(3)

        def run():
            begun.wait(PATIENCE)
            return go.wait(PATIENCE)

        running = [workers.submit(run) for _ in range(2)]
        begun.wait(PATIENCE)
        waiting = workers.submit(lambda: 1), workers.submit(lambda: 1, later=True)
        threading.Timer(0.1, go.set).start()
        workers.close()
        assert all(run.result(0) for run in running)
        assert all(one.cancelled() for one in waiting)
        assert workers.submit(lambda: 1).cancelled()


class Jit:
    """What a kernel needs of a jit function; `compiled` counts by thread."""

    __name__ = "_pretended"

    def __init__(self):
        self.compiled, self.ran = [], []
        self.gate, self.begun = threading.Event(), threading.Event()
        self.gate.set()
        self.fails = False

    def warmup(self, *args, grid, **options):
        self.begun.set()
        self.gate.wait(PATIENCE)
        self.compiled.append(threading.current_thread().name)
        if self.fails:
            raise RuntimeError("does not compile")
        return args

    def __getitem__(self, grid):
        def run(*args, **options):
            self.compiled.append(threading.current_thread().name)
            if self.fails:
                raise RuntimeError("does not compile")
            self.ran.append(args)
            return args

        return run


@pytest.fixture
def kernel(fake_gpu):
    """A kernel on a GPU that is not there."""

    jit = Jit()
    # The grid and the stream come first.
    entry = (lambda *values: jit.ran.append(values[4:6])), (), ()
    fake_gpu.has(raw=0, enter=contextlib.nullcontext, launcher=lambda compiled: entry)
    return launch.Kernel(jit, ("BLOCK",))


def start(kernel, key="a", target=HOPPER, args=(1, 2)):
    device = torch.device("cuda", 0)
    kernel.launch(device, target, (1, 1, 1), args, (16,), {"num_warps": 4}, key)


MAIN = threading.main_thread().name


class TestLaunches:
    def test_a_form_of_a_dry_run_is_compiled_elsewhere_and_does_not_run(self, kernel):
        with precompile.dry_run() as futures:
            start(kernel)
            start(kernel)
        assert len(futures) == 2 and futures[0] is futures[1]
        futures[0].result(PATIENCE)
        assert kernel.fn.ran == [] and len(kernel.fn.compiled) == 1
        assert MAIN not in kernel.fn.compiled
        start(kernel)
        assert kernel.fn.ran == [(1, 2)] and len(kernel.fn.compiled) == 1

    def test_a_launch_waits_for_the_form_that_is_being_compiled(self, kernel):
        kernel.fn.gate.clear()
        with precompile.dry_run() as futures:
            start(kernel)
        assert kernel.fn.begun.wait(PATIENCE)
        threading.Timer(0.1, kernel.fn.gate.set).start()
        start(kernel)
        assert futures[0].done() and kernel.fn.compiled == [kernel.fn.compiled[0]] != [MAIN]
        assert kernel.fn.ran == [(1, 2)]

    def test_a_launch_does_itself_what_nobody_has_begun(self, kernel, monkeypatch):
        busy = Workers(1, "busy")
        monkeypatch.setattr(precompile, "pool", busy)
        go = threading.Event()
        busy.submit(lambda: go.wait(PATIENCE))
        with precompile.dry_run() as futures:
            start(kernel)
        start(kernel)
        go.set()
        busy.close()
        assert kernel.fn.compiled == [MAIN] and futures[0].cancelled()

    def test_other_forms_and_other_threads_are_left_alone(self, kernel):
        with precompile.dry_run() as futures:
            thread = threading.Thread(target=start, args=(kernel, "b"))
            thread.start()
            thread.join()
            start(kernel)
        futures[0].result(PATIENCE)
        assert len(kernel.fn.ran) == 1 and len(futures) == 1 and precompile.futures() is None

    def test_what_failed_there_fails_where_it_is_wanted(self, kernel):
        kernel.fn.fails = True
        with precompile.dry_run():
            start(kernel)
        with pytest.raises(RuntimeError, match="does not compile"):
            start(kernel)

    def test_nothing_runs_where_nothing_is_compiled(self, kernel):
        with precompile.dry_run() as futures:
            start(kernel, target=NOWHERE)
        assert kernel.fn.ran == kernel.fn.compiled == futures == []
        start(kernel, target=NOWHERE)
        assert len(kernel.fn.ran) == 1


class TestTensorsBeyondTwoGibibytes:
    """What a launch on a real AMD GPU compiles beside them: a form of its own, without buffer
    operations."""

    @pytest.fixture
    def without(self, kernel, monkeypatch):
        """Whether each form was compiled without buffer operations."""
        found, inside = [], []

        @contextlib.contextmanager
        def switch():
            inside.append(True)
            yield
            inside.pop()

        def noting(compile_it):
            def noted(*args, **options):
                found.append(bool(inside))
                return compile_it(*args, **options)

            return noted

        class Noting(Jit):
            warmup = noting(Jit.warmup)

            def __getitem__(self, grid):
                return noting(super().__getitem__(grid))

        kernel.fn = Noting()
        monkeypatch.setattr(launch, "without_buffer_operations", switch)
        return found

    near, far = (torch.empty(n, dtype=torch.uint8, device="meta") for n in ((1 << 31) - 1, 1 << 31))

    @pytest.mark.parametrize("target, told", [(MI300, [False, True]), (HOPPER, [False])])
    def test_launches(self, kernel, without, target, told):
        for x in (self.near, self.far, self.near, self.far):
            start(kernel, target=target, args=(x, 2))
        assert without == told

    def test_a_part_of_a_large_tensor(self, kernel, without):
        """Whose memory counts, not its rows."""
        start(kernel, target=MI300, args=(self.far[:16], 2))
        assert without == [True]

    def test_forms_that_are_compiled_beforehand(self, kernel, without):
        for x in (self.near, self.far):
            with precompile.dry_run() as futures:
                start(kernel, target=MI300, args=(x, 2))
            futures[0].result(PATIENCE)
        assert without == [False, True]
        for x in (self.near, self.far):
            start(kernel, target=MI300, args=(x, 2))
        assert len(without) == 2
