"""Keys of jit functions in Triton's disk cache do not depend on what was compiled before."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from tests.conftest import INTERPRETED

PROGRAM = """
import importlib, json, pkgutil, sys
from sparse_bridge import kernels
for module in pkgutil.walk_packages(kernels.__path__, kernels.__name__ + "."):
    importlib.import_module(module.name)
from sparse_bridge.kernels.runtime import launch, triton_compat
names = sorted(launch.REGISTRY)
if sys.argv[1] == "backwards":
    names.reverse()
for name in names:
    triton_compat.settle_key(launch.REGISTRY[name].fn)
print(json.dumps({name: launch.REGISTRY[name].fn.cache_key for name in names}))
"""


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")
def test_whatever_comes_first():
    found = []
    for order in ("forwards", "backwards"):
        done = subprocess.run([sys.executable, "-c", PROGRAM, order], capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout))
    assert len(found[0]) > 30 and found[0] == found[1]
