"""Triton is imported in the background once a layer is made, where torch is built for GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

BUILD = """
import os, sys, threading
import torch
torch.version.cuda = {cuda!r}
import sparse_bridge
sparse_bridge.enable("spconv", mode="standin")
import spconv.pytorch as spconv
assert "triton" not in sys.modules
layer = spconv.SubMConv3d(4, 4, 3)
names = [thread.name for thread in threading.enumerate()]
"""


def run(script, cuda="13.0", **environment):
    pytest.importorskip("triton")
    text = BUILD.format(cuda=cuda) + textwrap.dedent(script)
    variables = {**os.environ, "TRITON_INTERPRET": "0", **environment}
    done = subprocess.run(
        [sys.executable, "-c", text], env=variables, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_first_layer_starts_it_and_a_fork_waits_for_it():
    run("""
        from triton.compiler import compiler
        from triton.runtime import cache
        from sparse_bridge.core import head_start
        if hasattr(os, "fork"):
            child = os.fork()
            if not child:
                import triton
                os._exit(0 if head_start._thread is not None else 1)
            assert not head_start._thread.is_alive()
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        head_start._finish()
        key = getattr(compiler, "triton_key", None) or cache.triton_key
        assert key.cache_info().currsize == 1
        once = head_start._thread
        spconv.SubMConv3d(4, 4, 3)
        assert head_start._thread is once
    """)


@pytest.mark.parametrize(
    "cuda, variable",
    [(None, {}), ("13.0", {"TRITON_INTERPRET": "1"}), ("13.0", {"SPARSE_BRIDGE_AHEAD": "0"})],
    ids=["a build for CPUs", "interpreted", "switched off"],
)
def test_where_nothing_is_started(cuda, variable):
    run('assert "sparse_bridge-head-start" not in names', cuda, **variable)


def test_a_triton_that_is_broken_is_not_told_here(tmp_path):
    (tmp_path / "triton.py").write_text("raise RuntimeError('broken')")
    run(
        """
        from sparse_bridge.core import head_start
        head_start._finish()
        assert not head_start._thread.is_alive()
        """,
        PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]),
    )
