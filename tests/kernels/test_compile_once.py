"""Workers of several programs want one form at one time: one compiles, the others wait for it."""

from __future__ import annotations

import os
import pathlib
import pickle
import signal
import subprocess
import sys

import pytest

from tests.patience import PATIENCE

pytest.importorskip("triton")


from sparse_bridge.kernels.runtime import compile_processes

from .test_compile_processes import gpu, pytestmark  # noqa: F401 (a fixture)

# Prints "asks", then "compiles" where it has to, which lasts until there is a file "go".
WORKER = """
import os, pathlib, pickle, sys, time
from sparse_bridge.kernels.runtime import compile_server
compile_server._import_kernels()
import triton
make_ir, folder = triton.compiler.ASTSource.make_ir, pathlib.Path(sys.argv[1])
def slowly(src, *args):
    print("compiles", flush=True)
    while not (folder / "go").exists():
        time.sleep(0.01)
    return make_ir(src, *args)
triton.compiler.ASTSource.make_ir = slowly
form = pickle.loads((folder / "form").read_bytes())
print("asks", flush=True)
compile_server._compile(*form)
print("done", flush=True)
"""


@pytest.fixture
def workers(gpu, tmp_path, monkeypatch):  # noqa: F811
    """A function that starts one more worker with the form and the same, empty disk cache."""
    taken: list[bytes] = []
    server = compile_processes.Processes
    monkeypatch.setattr(server, "compile", lambda self, form, start: taken.append(form))
    gpu.compile(16)
    environment, *form = pickle.loads(taken[0])
    folders = {name: str(tmp_path / name) for name in ("TRITON_CACHE_DIR", "TMPDIR")}
    (tmp_path / "TMPDIR").mkdir()
    environment |= folders
    (tmp_path / "form").write_bytes(pickle.dumps((environment, *form)))
    started = []

    def start() -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", WORKER, str(tmp_path)],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **folders},
            )
        )
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.communicate()


def test_one_compiles_and_the_other_waits(workers, tmp_path: pathlib.Path) -> None:
    first = workers()
    assert [first.stdout.readline() for _ in range(2)] == ["asks\n", "compiles\n"]
    second = workers()
    assert second.stdout.readline() == "asks\n"
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(0.5)
    (tmp_path / "go").touch()
    assert first.communicate(timeout=PATIENCE)[0] == "done\n"
    assert second.communicate(timeout=PATIENCE)[0] == "done\n", "found on disk"
    assert list((tmp_path / "TRITON_CACHE_DIR").rglob("*.cubin"))


@pytest.mark.slow
def test_a_worker_that_is_killed_leaves_no_lock(workers, tmp_path: pathlib.Path) -> None:
    first = workers()
    assert [first.stdout.readline() for _ in range(2)] == ["asks\n", "compiles\n"]
    second = workers()
    assert second.stdout.readline() == "asks\n"
    first.send_signal(signal.SIGKILL)
    assert second.stdout.readline() == "compiles\n"
    (tmp_path / "go").touch()
    assert second.communicate(timeout=PATIENCE)[0] == "done\n"


def test_ranks_do_not_divide_the_cores(monkeypatch) -> None:
    """They wait for one another, which costs no core."""
    monkeypatch.setattr(compile_processes, "cores", lambda: 12)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert compile_processes.side_by_side() == 12
