"""The helper under the sanitizers of memory and of undefined behaviour, in a process of its own."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from tests.native.recording import helper

pytestmark = pytest.mark.slow
FOLDER = pathlib.Path(__file__).parent
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g"
SUITES = {
    "launcher": ["test_launcher.py"],
    "events": ["test_events.py"],
    "memory": ["test_memory.py"],
    "streams": ["../core/prefetch/test_native_streams.py"],
    "maps": ["test_unordered.py"],
    "training": ["test_training.py"],
    "twins": ["test_twins.py", "test_rare_paths.py"],
}


def sanitizers():
    """Libraries that have to be loaded first: the sanitizer, and C++'s, whose exceptions it
    watches."""
    found = []
    for name in ("libasan.so", "libubsan.so", "libstdc++.so.6"):
        asked = ["gcc", f"-print-file-name={name}"]
        path = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
        if not os.path.isabs(path):
            pytest.skip(f"gcc has no {name}")
        found.append(os.path.realpath(path))
    return found


@pytest.mark.parametrize("suite", SUITES)
def test_a_suite(suite, tmp_path):
    helper()
    environment = os.environ | {
        "CC": f"gcc {FLAGS}",
        "LD_PRELOAD": ":".join(sanitizers()),
        "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "SPARSE_BRIDGE_CACHE_DIR": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path),
    }
    files = [str(FOLDER / name) for name in SUITES[suite]]
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        env=environment,
        cwd=FOLDER.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:])
    assert " passed" in done.stdout and "helper" not in done.stdout
    assert list(tmp_path.rglob("*.so")), "it was compiled for this"
