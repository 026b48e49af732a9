"""The helper in processes that end, fork, or hand it nothing."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from tests.native.recording import helper
from tests.patience import PATIENCE

ROOT = pathlib.Path(__file__).parents[2]


ALONE = """
from sparse_bridge.native import build
made = build.load()
class Other:
    pass
def asked():
    for name, count in COUNTS.items():
        assert getattr(made, name)(*[Other()] * count) is NotImplemented, name
COUNTS = {"known_call": 6, "normalised": 2, "activated": 3, "plus": 2}
COUNTS["features_of"] = 1
asked()
for wrong in ({}, 5, None, {"features_of": 1}):
    try:
        made.configure(wrong)
    except (KeyError, TypeError):
        asked()
    else:
        raise AssertionError(wrong)
made.refuse(0.5, 3)
asked()
"""


def in_a_process(code, **more):
    """Run it; its errors fail the test."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path} | more
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Fatal" not in done.stderr and "SystemError" not in done.stderr


def test_without_being_configured():
    """A library that nobody has handed anything decides nothing."""
    helper()
    in_a_process(ALONE)


CODE = """
import gc, os, sys
import torch
from tests.native.test_memory import world
with world() as it:
    for _ in range(3):
        it.net(it.x)
    {inside}
"""
ENDS = {
    "end": "sys.modules['kept'] = it",
    "exit": "os.register_at_fork(before=print); kept = [it, it.net(it.x)]; sys.exit(0)",
    "exception": "globals()['kept'] = it.net.conv1(it.x); raise SystemExit(0)",
    "fork": """
    child = os.fork()
    for _ in range(3):
        it.net(it.x)
    if not child:
        gc.collect(); os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
""",
    "threads": """
    import ctypes, threading, time
    from tests.native.recording import helper
    slow = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value
    launch = helper().Launcher(slow, 2000, 128, 0, "")
    def work():
        while True:
            launch(1, 1, 1, 0)
    for _ in range(3):
        threading.Thread(target=work, daemon=True).start()
    time.sleep(0.1)
""",
    "atexit": "import atexit; atexit.register(lambda: it.net(it.x))",
    "del": """
    class Last:
        def __del__(self):
            it.net(it.x)
    sys.modules['last'] = Last()
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDS)
def test_a_process_ends(name):
    helper()
    in_a_process(CODE.format(inside=ENDS[name]))


FORKED = """
import os
from sparse_bridge import native
native.begin()
child = os.fork()
made = native.module()
assert made is not None, native.reason()
assert made.Launcher and native.reason() is None
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_fork_waits_for_the_compiler(tmp_path):
    helper()
    in_a_process(FORKED, SPARSE_BRIDGE_CACHE_DIR=str(tmp_path))
