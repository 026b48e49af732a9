"""`sparse_bridge.memory_limit` over networks of the frameworks: the same bits, in blocks; and how a
program gets one without a change."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge import memory
from sparse_bridge.core.conv.row_blocks import torch_job
from sparse_bridge.core.device import memory_use
from sparse_bridge.core.maps import request as requests
from sparse_bridge.errors import LifecycleError, MemoryLimitError, SettingError
from tests.adapters.spconv.apis import without_wheel
from tests.clouds import cloud, features
from tests.patience import PATIENCE
from tests.quick import quick

GRID, CHANNELS = (24, 22, 20), 16
APIS = ("spconv", "torchsparse", "flex_gemm")


@pytest.fixture(autouse=True)
def no_wheel():
    with without_wheel():
        yield


@contextlib.contextmanager
def network_of(api, dtype):
    """run(features, coords) of a network with submanifold, strided and inverse layers, and one of
    kernel volume 1, through one framework's API."""
    torch.manual_seed(0)
    with sparse_bridge.enable(api, mode="standin"):
        made = {"spconv": spconv, "torchsparse": torchsparse, "flex_gemm": flex_gemm}[api]()
        yield made(dtype)


def spconv():
    import spconv.pytorch as sp

    def made(dtype):
        c = CHANNELS
        network = (
            sp.SparseSequential(
                sp.SubMConv3d(c, c, 3, indice_key="a"),
                nn.BatchNorm1d(c),
                nn.ReLU(),
                sp.SubMConv3d(c, c, 1),
                sp.SparseConv3d(c, 2 * c, 3, 2, 1, indice_key="down"),
                sp.SubMConv3d(2 * c, 2 * c, 3, indice_key="b"),
                nn.ReLU(),
                sp.SparseInverseConv3d(2 * c, c, 3, "down"),
                sp.SubMConv3d(c, c, 3, indice_key="a"),
            )
            .eval()
            .to(dtype)
        )
        return lambda x, coords: network(sp.SparseConvTensor(x, coords, list(GRID), 2)).features

    return made


def torchsparse():
    import torchsparse as ts
    import torchsparse.nn as spnn

    def made(dtype):
        c = CHANNELS
        network = (
            nn.Sequential(
                spnn.Conv3d(c, c, 3),
                spnn.BatchNorm(c),
                spnn.ReLU(True),
                spnn.Conv3d(c, c, 1),
                spnn.Conv3d(c, 2 * c, 2, stride=2),
                spnn.Conv3d(2 * c, 2 * c, 3, bias=True),
                spnn.Conv3d(2 * c, c, 2, stride=2, transposed=True),
                spnn.Conv3d(c, c, 3),
            )
            .eval()
            .to(dtype)
        )
        return lambda x, coords: network(ts.SparseTensor(x, coords)).feats

    return made


def flex_gemm():
    from flex_gemm.ops import spconv as functions

    def made(dtype):
        weights = [torch.randn(CHANNELS, 3, 3, 3, CHANNELS).to(dtype) / 20 for _ in range(2)]
        bias = torch.randn(CHANNELS).to(dtype)

        def run(x, coords):
            cache = None
            for weight in weights:
                x, cache = functions.sparse_submanifold_conv3d(
                    x, coords, torch.Size((2, CHANNELS, *GRID)), weight, bias, cache
                )
                x = x.relu()
            return x

        return run

    return made


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    """Rows of the blocks that were computed."""
    memory_use.reset()
    found, fill = [], torch_job.TorchJob.fill

    def watched(self, y, height):
        found.append(height)
        fill(self, y, height)

    monkeypatch.setattr(torch_job.TorchJob, "fill", watched)
    return found


@torch.no_grad()
def least_of(run):
    """The lowest limit under which `run()` passes, as its errors tell it, and its result."""
    limit = 1
    while True:
        try:
            with sparse_bridge.memory_limit(limit):
                return limit, run()
        except MemoryLimitError as error:
            assert error.least > limit
            limit = error.least


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("api", APIS)
def test_the_bits_of_networks(api, dtype, blocks, plain_settings):
    coords = cloud(GRID, 2, 0.3)
    x = features(len(coords), CHANNELS).to(dtype)
    with network_of(api, dtype) as network, torch.no_grad():
        for _ in range(3):  # trials of what follows layers are over, and plans are known
            want = network(x.clone(), coords.clone())
        blocks.clear()
        limit, y = least_of(lambda: network(x.clone(), coords.clone()))
        assert torch.equal(y, want)
        assert blocks and min(blocks) < len(x)
        with pytest.raises(MemoryLimitError), sparse_bridge.memory_limit(limit - 1):
            network(x.clone(), coords.clone())
        blocks.clear()
        with sparse_bridge.memory_limit("1GiB"):
            assert torch.equal(network(x.clone(), coords.clone()), want) and not blocks
        assert torch.equal(network(x.clone(), coords.clone()), want)


def test_a_map_of_the_way_down_is_built_again_on_the_way_up(blocks, monkeypatch, plain_settings):
    coords = cloud(GRID, 2, 0.3)
    x, asked = features(len(coords), CHANNELS), []
    build = requests.build

    def watched(cmap, req):
        asked.append(req)
        return build(cmap, req)

    monkeypatch.setattr(requests, "build", watched)
    with network_of("spconv", torch.float32) as network, torch.no_grad():
        network(x, coords.clone())
        usual = len(asked)
        limit, _ = least_of(lambda: network(x, coords.clone()))
        asked.clear()
        with sparse_bridge.memory_limit(limit):
            network(x, coords.clone())
        assert len(asked) > usual == len(set(asked)), "no map was built twice"


@pytest.mark.parametrize("size", [1e9, np.float64(1e9), np.int64(10**9), np.uint32(10**9), torch.tensor(10**9), "1GB"])
def test_whole_numbers_of_any_type_are_sizes(size):
    assert memory.size_of(size) == 10**9 and type(memory.size_of(size)) is int


@pytest.mark.parametrize("size", [1.5, float("inf"), float("nan"), True, None, -1.0, 0, torch.ones(2), (1,)])
def test_what_is_no_size(size):
    with pytest.raises(SettingError, match="a memory limit is"):
        memory.size_of(size)


def test_enable_takes_a_limit(plain_settings):
    with sparse_bridge.enable("torchsparse", mode="standin", memory_limit="2GiB"):
        assert memory.limit == 2 << 30
        with sparse_bridge.enable("spconv", mode="standin", memory_limit=1 << 30):
            assert memory.limit == 1 << 30
            sparse_bridge.enable("spconv", memory_limit="1GiB").disable()
            with pytest.raises(LifecycleError, match="is enabled with memory_limit=1073741824"):
                sparse_bridge.enable("spconv", memory_limit="3GiB")
        assert memory.limit == 2 << 30
    assert memory.limit is None
    with pytest.raises(SettingError, match="a memory limit is 'much'"):
        sparse_bridge.enable("spconv", memory_limit="much")
    assert memory.limit is None and not sparse_bridge.status()["spconv"].enabled


def of_one_gpu(fake_gpu, peaks):
    """The allocator's peaks of a GPU: of each time that they are read, and then the last."""

    def read(_):
        peak = peaks.pop(0) if len(peaks) > 1 else peaks[0]
        return {"allocated_bytes": {"all": {"current": 0, "peak": peak}}}

    fake_gpu.has(initialized=True, count=1, memory_stats=read)


@pytest.mark.parametrize("how", ("disable", "with"))
def test_what_exceeded_a_limit_of_enable(how, fake_gpu, plain_settings):
    """A layer says it, or a warning where it ends: no block of the program's does."""
    of_one_gpu(fake_gpu, [0, 2 << 30, 3 << 30])
    handle = sparse_bridge.enable("spconv", mode="standin", memory_limit="1GiB")
    with pytest.raises(MemoryLimitError, match=r"was 2\.00 GiB"):
        memory_use.need(torch.device("cuda", 0), 1, "a layer")
    with pytest.warns(RuntimeWarning, match=r"limit of 1\.00 GiB .* was 3\.00 GiB"):
        if how == "disable":
            handle.disable()
        else:
            with handle:
                pass
    assert memory.limit is None


def test_a_warning_that_is_an_error_leaves_nothing_enabled(fake_gpu, plain_settings):
    of_one_gpu(fake_gpu, [0, 2 << 30])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning), sparse_bridge.enable("spconv", mode="standin", memory_limit="1GiB"):
            pass
    assert memory.limit is None and not sparse_bridge.status()["spconv"].enabled


ENDS = """
import torch, sparse_bridge
if {how!r} == "enable":
    sparse_bridge.enable("spconv", mode="standin", memory_limit="1GiB")
torch.cuda.is_initialized = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.memory_stats_as_nested_dict = lambda gpu: {{"allocated_bytes": {{"all": {{"current": 0, "peak": 2 << 30}}}}}}
"""


@pytest.mark.parametrize("how", quick(["run"], ("enable", "run")))
def test_a_process_that_ends_says_it(how, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ENDS.format(how=how))
    options = ["-m", "sparse_bridge", "run", "--framework", "spconv", "--mode", "standin", "--memory-limit", "1GiB"]
    command = [sys.executable, *(options if how == "run" else []), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0
    assert "RuntimeWarning: under a memory limit of 1.00 GiB" in done.stderr and "was 2.00 GiB" in done.stderr
