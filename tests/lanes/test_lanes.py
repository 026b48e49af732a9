"""Kernels without a GPU: part of the suite again, in Triton's interpreter and on emulated AMD GPUs.

Each lane is a process of its own. The whole of it runs by hand:

    TRITON_INTERPRET=1 python -m pytest tests/core tests/kernels
    SPARSE_BRIDGE_TEST_ARCH=gfx942 python -m pytest tests/core tests/kernels  # on PYTHONPATH: emu
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.conftest import EMULATED, INTERPRETED

ROOT = pathlib.Path(__file__).parents[2]
HERE = pytest.mark.skipif(INTERPRETED or bool(EMULATED), reason="this is a lane already")
KERNELS = [
    "tests/kernels/test_hash_table.py",
    "tests/kernels/test_neighbor_table.py::test_look_up",
    "tests/kernels/test_mask_order.py::test_tiles",
    "tests/kernels/test_gemm.py::test_rows_around_the_tile",
    "tests/kernels/test_gemm.py::test_lists_of_the_wgrad",
    "tests/kernels/test_pooling.py",
    "tests/core/test_voxel.py",
    "tests/core/test_key_search.py",
]


def convolutions(lane):
    """Forward and backward: every kind in two dimensions, fp16, groups, split-K, repeated rows."""
    conv, edges = "tests/core/test_conv.py", "tests/core/test_conv_edges.py"
    kinds = ("submanifold", "strided", "generative", "inverse", "between")
    nodes = [f"{conv}::test_every_kind_and_dimension[{lane}-masked-{kind}-2]" for kind in kinds]
    nodes += [
        f"{conv}::test_every_kind_and_dimension[{lane}-unmasked-submanifold-2]",
        f"{conv}::test_groups[{lane}-masked-submanifold-2-32-64]",
        f"{conv}::test_half_precision_with_odd_channels[{lane}-masked-torch.float16]",
        f"{edges}::test_split_k[{lane}-masked-torch.float16]",
        f"{edges}::test_repeated_coordinates[{lane}-masked-submanifold]",
    ]
    return nodes


def run(nodes, at_least, **environment):
    """The nodes pass in a process with `environment`, and no fewer than `at_least` of them ran."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *nodes],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTEST_ADDOPTS": "", **environment},
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= at_least, done.stdout[-2000:]


@HERE
def test_interpreter():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    run([*KERNELS, *convolutions("interpreter")], 100, TRITON_INTERPRET="1")


def emulator_there():
    """Whether PYTHONPATH names the emulator, whatever other package may be called `emu`."""
    spec = importlib.util.find_spec("emu")
    folders = [] if spec is None else spec.submodule_search_locations or []
    return any((pathlib.Path(folder) / "triton_driver.py").exists() for folder in folders)


@HERE
@pytest.mark.emulated
@pytest.mark.skipif(not emulator_there(), reason="the emulator is not on PYTHONPATH")
@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
def test_emulated_gpu(arch):
    """The hash table and a convolution, forward and backward, as machine code of that GPU."""
    run([KERNELS[0], *convolutions(arch)], 40, SPARSE_BRIDGE_TEST_ARCH=arch)
