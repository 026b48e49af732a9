"""Triton is imported with the first layer, and hashes itself in the background, where there is a
GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from tests.patience import PATIENCE

BUILD = """
import os, sys, threading
import torch
torch.cuda.device_count = lambda: {gpus}
import sparse_bridge
sparse_bridge.enable("spconv", mode="standin")
import spconv.pytorch as spconv
assert "triton" not in sys.modules
layer = spconv.SubMConv3d(4, 4, 3)
from sparse_bridge.core.warmup import preload
preload._LONGEST = {patience}  # how long a fork waits: a busy machine takes longer than ten seconds

def hashed():
    from triton.compiler import compiler
    from triton.runtime import cache
    key = getattr(compiler, "triton_key", None) or cache.triton_key
    return key.cache_info().currsize
"""


def run(script, gpus=1, **environment):
    pytest.importorskip("triton")
    text = BUILD.format(gpus=gpus, patience=PATIENCE) + textwrap.dedent(script)
    variables = {**os.environ, "TRITON_INTERPRET": "0", **environment}
    done = subprocess.run([sys.executable, "-c", text], env=variables, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.timed
def test_a_first_layer_starts_it_and_a_fork_waits_for_it():
    run("""
        assert "triton" in sys.modules
        if hasattr(os, "fork"):
            child = os.fork()
            if not child:
                os._exit(hashed() != 1)
            assert not preload._thread.is_alive()
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        preload.finish()
        assert hashed() == 1
        once = preload._thread
        spconv.SubMConv3d(4, 4, 3)
        assert preload._thread is once
    """)


@pytest.mark.sample(0)
@pytest.mark.parametrize(
    "gpus, variable",
    [(0, {}), (1, {"TRITON_INTERPRET": "1"}), (1, {"SPARSE_BRIDGE_STARTUP": "warmup=0"})],
    ids=["no GPU", "interpreted", "switched off"],
)
def test_where_nothing_is_started(gpus, variable):
    run('assert preload._thread is None and "triton" not in sys.modules', gpus, **variable)


@pytest.mark.sample(1)
@pytest.mark.timed
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="looks into /proc")
@pytest.mark.parametrize("filled", [False, True])
def test_an_empty_disk_cache_starts_the_compile_server(tmp_path, filled):
    """One with anything in it does not: what is wanted may be there."""
    if filled:
        (tmp_path / "A").mkdir()
    script = """
        import pathlib
        preload.finish()
        tasks = pathlib.Path("/proc/self/task").glob("*/children")
        children = [child for task in tasks for child in task.read_text().split()]
        assert len(children) == {count}, children
    """
    run(script.format(count=0 if filled else 1), TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.slow
def test_a_triton_that_is_broken_is_not_told_here(tmp_path):
    (tmp_path / "triton.py").write_text("raise RuntimeError('broken')")
    run("assert preload._begun and preload._thread is None", PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
