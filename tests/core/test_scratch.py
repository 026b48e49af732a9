"""Freed memory stays with the process, so that the next layer does not fault it in again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from sparse_bridge.core.device import workspace
workspace.keep_heap()
def layers():
    return [torch.ones(5 << 18) for _ in range(20)]  # 100 MB
for _ in range(3):
    layers()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
layers()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.sample(1)
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator is meant")
@pytest.mark.parametrize("told", [False, True])
def test_freed_memory_is_kept_unless_the_environment_says_otherwise(told):
    pages = (100 << 20) // os.sysconf("SC_PAGE_SIZE")
    environment = {key: value for key, value in os.environ.items() if key != "GLIBC_TUNABLES"}
    environment.pop("MALLOC_TRIM_THRESHOLD_", None)
    if told:
        environment["MALLOC_TRIM_THRESHOLD_"] = "131072"
    run = subprocess.run([sys.executable, "-c", FAULTS], env=environment, capture_output=True, text=True, check=True)
    faults = int(run.stdout)
    assert faults > pages // 4 if told else faults < pages // 20
