"""Nothing is launched that the list of forms does not hold: networks and layers of every kind run
with the tiles of real GPUs, and each launch is looked up.

Kernels run in Triton's interpreter; only what asks for the device gets the answer of another one.
"""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch

import sparse_bridge
from sparse_bridge import settings
from sparse_bridge.core import functional
from sparse_bridge.core.conv import depthwise
from sparse_bridge.core.maps import key_search, map_builder
from sparse_bridge.core.ops import batch_norm, max_rows, serialize, voxel
from sparse_bridge.kernels.gemm import wgrad_gemm
from sparse_bridge.kernels.maps import level_bounds, mask_order, new_rows, pair_batch, row_ranks, tile_batch
from sparse_bridge.kernels.maps.neighbor_table import NeighborTable
from sparse_bridge.kernels.runtime import target as targets
from sparse_bridge.kernels.runtime.launch import REGISTRY, Kernel
from sparse_bridge.tools.offline_compile.catalogue import launchable
from sparse_bridge.tools.offline_compile.forms import as_launched
from tests.adapters.spconv import apis
from tests.adapters.torchsparse.conftest import speaking
from tests.clouds import cloud, features
from tests.conftest import INTERPRETED
from tests.core.layers import KINDS, layer

pytestmark = [pytest.mark.interpreted, pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter lane")]

# Their results decide nothing that is launched later, and interpreting them takes the time.
UNREAD = ("gather_gemm", "grouped_gemm", "narrow_gemm", "sum_partials", "sum_products", "sum_shares", "wgrad_gemm")


class Recorder:
    """Launches of one test: the distinct ones, and those that nobody declared."""

    def __init__(self, target):
        self.target, self.seen = target, set()
        self.launch = Kernel.launch

    def __call__(self, kernel, device, target, grid, args, constants, options, key):
        assert target is self.target
        self.seen.add(as_launched(kernel, args, constants, options))
        if kernel.name == "order_few":
            # Any order of rows is right; sorting in the interpreter takes seconds.
            args[1].copy_(torch.arange(len(args[1])))
        elif kernel.name not in UNREAD:
            self.launch(kernel, device, target, grid, args, constants, options, key)

    def undeclared(self):
        return [one for one in self.seen if not launchable(self.target, one)]


@pytest.fixture
def recorder(fake_gpu, request):
    """Launches as on the GPU that the test names."""
    target = targets.described(request.param)
    made = Recorder(target)
    fake_gpu.has(target=target, launches=made)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with settings.override(dataflow="masked"):
        yield made
    torch.set_num_threads(threads)


def spconv_network():
    with apis.standin() as sp:
        net = sp.SparseSequential(
            sp.SubMConv3d(4, 16, 3, indice_key="s"),
            sp.SparseConv3d(16, 32, 3, 2, 1),
            sp.SparseConv3d(32, 48, 2, 2, indice_key="d", bias=False),
            sp.SparseInverseConv3d(48, 32, 2, "d"),
            sp.SparseMaxPool3d(2, 2),
        )
        coords = cloud((4, 5, 4))
        x = sp.SparseConvTensor(features(len(coords), 4), coords, [4, 5, 4], 2)
        net(x).features.sum().backward()


def torchsparse_network():
    with speaking("2.1") as ts:
        net = torch.nn.Sequential(
            ts.nn.Conv3d(4, 16, 3),
            ts.nn.Conv3d(16, 32, 2, stride=2),
            ts.nn.Conv3d(32, 16, 2, stride=2, transposed=True),
            ts.nn.GlobalAvgPool(),
        )
        coords = cloud((4, 5, 4))
        net(ts.SparseTensor(features(len(coords), 4), coords)).sum().backward()


def minkowski_network():
    with sparse_bridge.enable("minkowski"):
        ME = importlib.import_module("MinkowskiEngine")
        coords = cloud((4, 5, 4))
        x = ME.SparseTensor(features(len(coords), 4), coords)
        net = torch.nn.Sequential(
            ME.MinkowskiConvolution(4, 16, kernel_size=3, dimension=3),
            ME.MinkowskiChannelwiseConvolution(16, kernel_size=3, dimension=3),
            ME.MinkowskiConvolution(16, 32, kernel_size=2, stride=2, dimension=3),
            ME.MinkowskiMaxPooling(kernel_size=2, stride=2, dimension=3),
            ME.MinkowskiGenerativeConvolutionTranspose(32, 16, 2, stride=2, dimension=3),
            ME.MinkowskiGlobalMaxPooling(),
        )
        net(x).F.sum().backward()


@pytest.mark.parametrize(
    "recorder, run",
    [("gfx1100", spconv_network), ("sm_80", torchsparse_network), ("gfx950", minkowski_network)],
    indirect=["recorder"],
)
def test_networks(recorder, run):
    """A network of each framework, forward and backward."""
    run()
    assert {"gather_gemm", "wgrad_gemm", "neighbor_lookup"} <= {one.kernel for one in recorder.seen}
    assert recorder.undeclared() == []


def convolve(made, c_in, c_out, dtype, tf32, bias):
    x = features(made.kmap.n_in, c_in, dtype=dtype).requires_grad_()
    weight = torch.ones(made.volume, c_in, c_out, dtype=dtype, requires_grad=True)
    shift = torch.ones(c_out, dtype=dtype, requires_grad=True) if bias else None
    functional.conv(x, weight, shift, made.kmap, allow_tf32=tf32).sum().backward()
    with torch.no_grad(), torch.autocast("cpu", torch.float16, enabled=dtype == torch.float32):
        y = functional.conv(x, weight, shift, made.kmap, activation="relu", allow_tf32=tf32)
        functional.conv(x, weight, shift, made.kmap, residual=y, allow_tf32=tf32)


def every_row_kernel(made):
    """Pools, depthwise products, maxima and voxel operators."""
    n = made.kmap.n_in
    for channels, dtype in ((1, torch.float32), (40, torch.float16)):
        x = features(n, channels, dtype=dtype).requires_grad_()
        for mode in ("max", "avg", "sum"):
            functional.pool(x, made.kmap, mode).sum().backward()
            item = torch.arange(n) % 2
            functional.global_pool(x, item, 2, mode).sum().backward()
            many = features(600, channels, dtype=dtype).requires_grad_()
            functional.global_pool(many, torch.zeros(600).int(), 1, mode).sum().backward()
        weight = torch.ones(made.volume, channels, dtype=dtype, requires_grad=True)
        depthwise.channelwise(x, weight, made.kmap).sum().backward()
        max_rows.window_max(x, made.kmap).sum().backward()
        normalise(x)
    points = features(50, 3) * 3
    cells = torch.arange(50) % 7
    counts = voxel.count(cells, 7)
    for dtype in (torch.float64, torch.float16):
        means = voxel.voxelize(features(50, 5, dtype=dtype).requires_grad_(), cells, counts)
        means.sum().backward()
    index = (torch.arange(400) % 9 - 1).view(50, 8)
    weights = voxel.trilinear_weights(points, index)
    voxel.devoxelize(features(7, 5).requires_grad_(), index, weights).sum().backward()
    sites = torch.zeros((9, 4), dtype=torch.int32)
    for curve in ("z_order", "hilbert"):
        for dtype in (torch.int32, torch.int64):
            serialize.decode(serialize.encode(sites, 5, curve, dtype), 5, curve)
    keys = key_search.hash_rows(cells.int().view(-1, 1).repeat(1, 4))
    key_search.hash_rows(cells.int().view(-1, 1).repeat(1, 4), torch.ones(2, 3).int(), first=1)
    key_search.find_keys(keys[:9], keys[5:])


def normalise(x):
    """By layers in x's dtype, in fp32, and without anything of their own."""
    channels, count = x.shape[1], torch.tensor([x.shape[0] - 2], dtype=torch.int32)
    norm = torch.nn.BatchNorm1d(channels)
    for one in (norm, torch.nn.BatchNorm1d(channels).to(x.dtype)):
        steps = one.num_batches_tracked
        for batches, relu, live in ((steps, True, None), (None, False, count)):
            vectors = one.weight, one.bias, one.running_mean, one.running_var, batches
            batch_norm.batch_norm(x, vectors, momentum=0.1, eps=1e-5, relu=relu, count=live).sum().backward()
    for weight in (None, norm.weight):
        vectors = weight, None, None, None, None
        batch_norm.batch_norm(x, vectors, momentum=0.1, eps=1e-5).sum().backward()


TINY = {1: (12,), 2: (5, 4), 3: (3, 4, 3)}


@pytest.mark.parametrize(
    "recorder",
    ["gfx90a", *(pytest.param(a, marks=pytest.mark.slow) for a in ("gfx1201", "sm_75", "sm_90"))],
    indirect=True,
)
def test_layers(recorder, rules, monkeypatch):
    """Layers of every kind, dimension and dtype, odd and large channels; every kernel is met."""
    channels = itertools.cycle([(1, 1), (16, 33), (64, 64), (96, 256), (130, 20), (256, 256)])
    dtypes = [(torch.float16, False), (torch.float32, False), (torch.float32, True)]
    dtypes += [(torch.bfloat16, False)] if recorder.target.has_bf16 else []
    products = itertools.cycle(dtypes)
    for dimension, kind in zip((1, 2, 3, 1, 2), KINDS, strict=True):
        made = layer(kind, shape=TINY[dimension], share=0.4)
        for _ in range(5):
            convolve(made, *next(channels), *next(products), bias=kind == "strided")
    convolve(layer("submanifold", shape=TINY[2], kernel=7), 32, 32, torch.float16, False, True)
    every_row_kernel(layer("strided", shape=TINY[2]))
    coords = cloud(TINY[2], 1)
    ends = torch.stack([coords.amin(0), coords.amax(0)])
    record = torch.empty(8, dtype=torch.int64)
    level_bounds.level_bounds(ends, torch.zeros(1, 2).int(), record, recorder.target)
    new_rows.repeat_first(coords, torch.zeros(1, dtype=torch.int32), recorder.target)
    repeated = functional.coordinate_map(torch.cat([coords, coords[:3]]), TINY[2], 1)
    convolve_map(functional.submanifold(repeated, functional.kernel_offsets((3, 3))))
    for flow in ("unmasked", "grouped", "masked:2", "masked:3"):
        with settings.override(dataflow=flow):
            convolve_map(layer("strided", shape=TINY[1]).kmap)
    tables = [NeighborTable(torch.zeros(4, 5).int()) for _ in range(2)]
    tiles = tile_batch.tile_batch(tables, recorder.target)
    pair_batch.PairBatch(tiles, [2, 4], recorder.target).write([10, 20])
    sorted_rows(coords)
    rules.set(row_ranks, FEW_ROWS=0)
    sorted_rows(coords)
    rules.set(mask_order, FEW_ROWS=0)
    convolve_map(layer("strided", shape=TINY[1]).kmap)
    monkeypatch.setattr(wgrad_gemm, "wgrad_shares", lambda *_: 3)
    convolve_map(layer("strided", shape=TINY[1]).kmap)
    assert recorder.undeclared() == []
    assert {one.kernel for one in recorder.seen} == set(REGISTRY)
    assert len(recorder.seen) > 80


def sorted_rows(coords):
    cmap = functional.coordinate_map(coords, TINY[2], 1)
    map_builder.strided(cmap, functional.kernel_offsets((2, 2)), (2, 2), cmap.box, "sorted")


def convolve_map(kmap):
    x = features(kmap.n_in, 16).requires_grad_()
    weight = torch.ones(kmap.n_offsets, 16, 16, requires_grad=True)
    functional.conv(x, weight, None, kmap).sum().backward()


@pytest.mark.parametrize("recorder", ["sm_90"], indirect=True)
def test_an_undeclared_launch_is_seen(recorder, monkeypatch):
    """Two warps instead of four: no such form is on the list."""
    launch = Recorder.__call__

    def with_two(self, kernel, device, target, grid, args, constants, options, key):
        if kernel.name == "pool_forward":
            options = {"num_warps": 2}
        launch(self, kernel, device, target, grid, args, constants, options, key)

    monkeypatch.setattr(Recorder, "__call__", with_two)
    made = layer("strided", shape=TINY[1])
    functional.pool(features(made.kmap.n_in, 4), made.kmap, "sum")
    assert {one.kernel for one in recorder.undeclared()} == {"pool_forward"}
