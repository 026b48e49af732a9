"""Forms are compiled by worker processes, which end in time; without them, by this process."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from tests.patience import PATIENCE, wait_for

pytest.importorskip("triton")

import triton

from sparse_bridge.kernels.ops import column_sum
from sparse_bridge.kernels.runtime import compile_processes, launch, precompile, triton_compat
from sparse_bridge.kernels.runtime.target import Target
from sparse_bridge.workers import Workers
from tests.conftest import EMULATED, INTERPRETED
from tests.quick import quick

pytestmark = [
    pytest.mark.skipif(bool(INTERPRETED or EMULATED), reason="nothing is compiled for a GPU here"),
    pytest.mark.skipif(triton_compat.VERSION < (3, 4), reason="its drivers cannot be imitated"),
    pytest.mark.skipif(not pathlib.Path("/proc/self/task").is_dir(), reason="looks into /proc"),
]
HOPPER = Target("cuda", "sm_90", 32, 132, 227 << 10, raw=True)
_devices = itertools.count(7000)  # Triton keeps kernels by device


class Driver:
    """A GPU's, as far as a compilation asks."""

    def __init__(self, backend="cuda", arch=90, lanes=32):
        self.target = triton.backends.compiler.GPUTarget(backend, arch, lanes)
        self.device = next(_devices)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        return 0


def children(process=None):
    """Process numbers of the descendants of a process."""
    found = []
    for task in pathlib.Path(f"/proc/{process or os.getpid()}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *children(child)]
    return found


def command(process):
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{process}/cmdline").read_bytes().decode().replace("\0", " ")
    return ""


def servers():
    """Compile server and workers of this process."""
    return [one for one in children() if "compile_server" in command(one)]


def change_server(monkeypatch, assignment):
    program = compile_processes._PROGRAM.replace("; compile", f"; compile_server.{assignment}; ____")
    program = program.replace("____", "compile")
    monkeypatch.setattr(compile_processes, "_PROGRAM", program)


def noted_starts(monkeypatch, fail=False):
    """A list that grows with every server."""
    started, popen = [], subprocess.Popen

    def noting(given, **options):
        if given[0] == sys.executable:
            started.append(given)
            if fail:
                raise PermissionError("as asked")
        return popen(given, **options)

    monkeypatch.setattr(subprocess, "Popen", noting)
    return started


class Gpu:
    """A kernel on a GPU that is not there, with an empty disk cache."""

    def __init__(self, monkeypatch, pool):
        self.patch, self.pool, self.here = monkeypatch, pool, []
        self.turn_on()
        make_ir = triton.compiler.ASTSource.make_ir

        def noting(src, *args):
            self.here.append(src.name)
            return make_ir(src, *args)

        monkeypatch.setattr(triton.compiler.ASTSource, "make_ir", noting)

    def turn_on(self, *target):
        """As in a new process: Triton has nothing in memory."""
        self.patch.setattr(triton.runtime.driver, "_active", Driver(*target))
        kernel = column_sum.totals_kernel
        self.kernel = launch.Kernel(kernel.fn, kernel.constants)

    def compile(self, parts=16, beforehand=True):
        """A form per number of parts, in a dry run, or for a launch."""
        x, y = torch.empty(64, 16), torch.empty(16)
        given = (torch.device("cuda", 0), HOPPER, (1, 1, 1), (x, y, 4, 16), (parts, 16))
        with precompile.dry_run() if beforehand else contextlib.nullcontext() as futures:
            self.kernel.launch(*given, {"num_warps": 4}, (parts,))
        return futures[0].result(PATIENCE) if beforehand else None

    def made(self):
        """Whether the kernel has been compiled, by anybody."""
        return len(self.kernel._compiled)


@pytest.fixture
def gpu(fake_gpu, monkeypatch, tmp_path):
    pool = Workers(2, "test")
    monkeypatch.setattr(precompile, "pool", pool)
    monkeypatch.setattr(compile_processes, "side_by_side", lambda: 1)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    fake_gpu.has(raw=0, enter=contextlib.nullcontext, launcher=lambda compiled: ("entry", compiled))
    for name in ("run", "launch_metadata"):
        monkeypatch.setattr(triton.compiler.CompiledKernel, name, lambda *args: None)
    compile_processes.reset()
    yield Gpu(monkeypatch, pool)
    pool.close()
    compile_processes.reset()
    wait_for(lambda: not servers())


class TestForms:
    def test_workers_compile_and_this_process_loads(self, gpu, monkeypatch):
        """The disk cache knows them by the same key; in a warm start no process is begun."""
        gpu.compile(16), gpu.compile(32)
        assert gpu.here == [] and gpu.made() == 2
        assert len(servers()) == 3, "a server, a worker, and one for launches"
        compile_processes.reset()
        wait_for(lambda: not servers())
        started = noted_starts(monkeypatch)
        gpu.turn_on()
        gpu.compile(16), gpu.compile(32)
        assert gpu.here == [] and gpu.made() == 2 and started == []

    def test_switches_of_the_compiler(self, gpu):
        """As they are when a form is compiled, not when the server was started."""
        gpu.turn_on("hip", "gfx942", 64)
        gpu.compile(16)
        gpu.turn_on("hip", "gfx942", 64)
        with triton_compat.without_buffer_operations():
            gpu.compile(16)
        assert gpu.here == [] and len(servers()) == 3
        found = pathlib.Path(os.environ["TRITON_CACHE_DIR"]).rglob("_column_totals.ttgir")
        assert len(list(found)) == 2

    def test_a_launch_asks_workers_that_are_there(self, gpu):
        gpu.compile(16, beforehand=False)
        assert gpu.here == ["_column_totals"] and servers() == []
        gpu.compile(32)
        wait_for(lambda: len(servers()) == 3)
        gpu.compile(64, beforehand=False)
        assert gpu.here == ["_column_totals"]

    @pytest.mark.parametrize("beforehand", [True, False])
    def test_errors_are_raised_here(self, gpu, beforehand):
        with pytest.raises(triton.CompilationError, match="power of 2"):
            gpu.compile(3, beforehand)
        gpu.compile(16)
        assert gpu.here == ["_column_totals"], "the worker goes on"

    def test_several_threads(self, gpu, monkeypatch):
        monkeypatch.setattr(compile_processes, "side_by_side", lambda: 2)
        threads = [threading.Thread(target=gpu.compile, args=(1 << n,)) for n in range(2, 8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert gpu.here == [] and gpu.made() == 6


class TestWithoutProcesses:
    """Everything is compiled here, and nothing waits."""

    def forms(self, gpu, count=4):
        for n in range(count):
            gpu.compile(16 << n)
        assert gpu.made() == count
        return len(gpu.here)

    @pytest.mark.parametrize("broken", ["switched off", "no python", "frozen", "no processes"])
    def test_they_cannot_be_had(self, gpu, monkeypatch, broken):
        started = noted_starts(monkeypatch, fail=broken == "no processes")
        if broken == "switched off":
            monkeypatch.setattr(compile_processes, "enabled", False)
        elif broken == "no python":
            monkeypatch.setattr(sys, "executable", "/usr/bin/blender")
        elif broken == "frozen":
            monkeypatch.setattr(sys, "frozen", True, raising=False)
        assert self.forms(gpu, 2) == 2 and bool(started) == (broken == "no processes")

    def test_a_server_that_fails_is_not_started_for_ever(self, gpu, monkeypatch):
        monkeypatch.setattr(compile_processes, "_PROGRAM", "raise SystemExit(1)")
        started = noted_starts(monkeypatch)
        assert self.forms(gpu) == 4 and 1 <= len(started) <= 3

    def test_a_server_that_is_slow_is_not_waited_for(self, gpu, rules, monkeypatch):
        program = compile_processes._PROGRAM
        monkeypatch.setattr(compile_processes, "_PROGRAM", f"import time; time.sleep(2); {program}")
        rules.set(compile_processes, _PATIENCE=0.2)
        assert self.forms(gpu, 2) == 2
        wait_for(lambda: len(servers()) == 3)
        # They are there, and may still take their time to answer on a busy machine.
        rules.set(compile_processes, _PATIENCE=PATIENCE)
        gpu.compile(512)
        assert len(gpu.here) == 2

    def test_a_worker_that_is_killed(self, gpu, monkeypatch):
        """In the middle of a form, which is compiled here; others take the next ones."""
        gpu.compile(16)
        for one in servers():
            if not children(one):
                os.kill(one, signal.SIGSTOP)
        waiting = threading.Thread(target=gpu.compile, args=(32,))
        waiting.start()
        time.sleep(0.2)
        assert waiting.is_alive()
        for one in servers():
            if not children(one):
                os.kill(one, signal.SIGKILL)
        waiting.join(PATIENCE)
        assert gpu.here == ["_column_totals"] and gpu.made() == 2
        gpu.compile(64)
        assert gpu.here == ["_column_totals"], "another server"

    def test_a_worker_that_hangs(self, gpu, rules, monkeypatch):
        rules.set(compile_processes, _LONGEST=0.3)
        change_server(monkeypatch, "_compile = lambda *form: __import__('time').sleep(5)")
        gpu.compile(16)
        assert gpu.here == ["_column_totals"]
        for one in servers():
            os.kill(one, signal.SIGKILL)

    def test_another_disk_cache(self, gpu, monkeypatch, caplog):
        """Or none: after a few forms nobody is asked any more."""
        monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
        with caplog.at_level(logging.DEBUG, logger="sparse_bridge"):
            assert self.forms(gpu) == 4
        assert caplog.text.count("not in the disk cache") == 3

    def test_in_a_fork_of_the_program(self, gpu, monkeypatch):
        gpu.compile(16)
        fork = os.fork()
        if not fork:
            with contextlib.suppress(BaseException):
                monkeypatch.setattr(precompile, "pool", Workers(1, "fork"))
                gpu.compile(64)
                os._exit(0 if gpu.here == ["_column_totals"] and not servers() else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 0
        gpu.compile(32)
        assert gpu.here == []


class TestEnds:
    def test_without_work(self, gpu, monkeypatch):
        """And are there again when there is some."""
        change_server(monkeypatch, "IDLE = 0.3")
        gpu.compile(16)
        before = servers()
        wait_for(lambda: not servers())
        gpu.compile(32)
        assert gpu.here == [] and not set(servers()) & set(before)

    def test_they_are_no_group_of_the_terminals(self, gpu):
        """Ctrl-C reaches the program alone."""
        gpu.compile(16)
        assert all(os.getsid(one) != os.getsid(0) for one in servers())

    @pytest.mark.parametrize("how", quick([signal.SIGKILL], [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
    def test_with_the_program(self, how):
        program = (
            "import time; from sparse_bridge.kernels.runtime import compile_processes as c\n"
            "c.side_by_side = lambda: 1; c.start(); print('on', flush=True); time.sleep(60)"
        )
        with subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as running:
            assert running.stdout.readline() == b"on\n"
            wait_for(lambda: len(children(running.pid)) == 3)
            found = children(running.pid)
            running.send_signal(how)
            running.wait(PATIENCE)
        wait_for(lambda: not any("compile_server" in command(one) for one in found))

    @pytest.mark.slow
    def test_with_a_program_that_is_through(self):
        """Which ends, silently."""
        program = (
            "from sparse_bridge.kernels.runtime import compile_processes as c\nc.side_by_side = lambda: 1; c.start()"
        )
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0 and done.stderr == ""


def test_the_server_imports_no_torch():
    program = (
        "import sys; from sparse_bridge.kernels.runtime import compile_server\n"
        "compile_server.main([])\n"
        "found = [name for name in sys.modules if name.startswith(('torch', 'numpy'))]\n"
        "assert found == ['torch'] and not hasattr(sys.modules['torch'], '__version__'), found"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE)


@pytest.mark.parametrize(("compiled", "useless"), [(3, True), (5, True), (6, False), (40, False)])
def test_processes_are_given_up_where_most_of_their_forms_are_not_found(compiled, useless):
    processes = compile_processes.Processes()
    processes.compiled = compiled
    for _ in range(2):
        processes.in_vain("a_kernel")
    assert not processes.useless
    processes.in_vain("a_kernel")
    assert processes.useless is useless
