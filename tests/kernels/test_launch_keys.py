"""Launch keys must tell apart whatever Triton's own specialisation tells apart.

A key finds a compiled kernel again without Triton's analysis of the arguments, so two launches with
one key must be two of the same kernel: same types, same divisibility, same constexprs and options.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from sparse_bridge.core import functional
from sparse_bridge.core.geometry.boxes import Box
from sparse_bridge.core.geometry.weights import layout_of
from sparse_bridge.kernels.gemm.gather_gemm import GatherGemm
from sparse_bridge.kernels.gemm.gather_spec import GemmSpec
from sparse_bridge.kernels.gemm.product import Product
from sparse_bridge.kernels.maps import row_ranks
from sparse_bridge.kernels.maps.hash_table import HashTable
from sparse_bridge.kernels.runtime.launch import REGISTRY, Kernel, specialise
from sparse_bridge.kernels.runtime.parts import viewed
from sparse_bridge.kernels.tiles.tile import TileConfig
from tests.checks import assert_close
from tests.clouds import cloud, features
from tests.kernels.calls import target_of

pytestmark = [pytest.mark.emulated]

SHAPE = (9, 10)


@pytest.fixture
def keys(monkeypatch, kernel_lane):
    """Checks every launch of the test against those before it."""
    if not kernel_lane.arch:
        pytest.skip("an AMD target's specialisation tells most apart; another would only compile")
    from triton.runtime import driver

    seen: dict = {}
    launch = Kernel.launch

    def checked(self, device, target, grid, args, constants, options, key):
        fn = self.fn
        binder = fn.device_caches[driver.active.get_current_device()][-1]
        given = map(viewed, args)  # as `launch` does
        _, analysis, rest = binder(*given, *constants, debug=False, **options)
        full = self.name, self.variant(target, args, key)
        known = seen.setdefault(full, (str(analysis), str(rest)))
        assert known == (str(analysis), str(rest)), f"{self.name}: one key, two kernels"
        launch(self, device, target, grid, args, constants, options, key)

    monkeypatch.setattr(Kernel, "launch", checked)
    return seen


def shifted(tensor, by):
    """The same values `by` elements behind an aligned address."""
    room = torch.empty(tensor.numel() + 64, dtype=tensor.dtype, device=tensor.device)
    room = room[by : by + tensor.numel()].view(tensor.shape)
    return room.copy_(tensor)


@pytest.mark.parametrize("split", [False, True])
def test_addresses(kernel_lane, keys, split):
    """x, weight, bias and gradient at aligned and odd addresses, in every combination."""
    coords = cloud(SHAPE, 1, 0.1 if split else 0.6, device=kernel_lane.device)
    cmap = functional.coordinate_map(coords, SHAPE, 1)
    kmap = functional.submanifold(cmap, functional.kernel_offsets((3, 3)))
    x, dy = features(len(coords), 16), features(len(coords), 32, 1)
    weight, bias = features(9 * 16, 32, 2).view(9, 16, 32), features(1, 32, 3)[0]
    tensors = [t.to(kernel_lane.device) for t in (x, weight, bias, dy)]
    for shifts in itertools.product((0, 1), repeat=4):
        moved = [shifted(t, by) for t, by in zip(tensors, shifts, strict=True)]
        leaves = [t.requires_grad_() for t in moved[:3]]
        functional.conv(*leaves, kmap).backward(moved[3])
    assert keys


def test_addresses_of_pools(kernel_lane, keys):
    coords = cloud(SHAPE, 1, 0.6, device=kernel_lane.device)
    cmap = functional.coordinate_map(coords, SHAPE, 1)
    _, kmap = functional.strided(cmap, functional.kernel_offsets((3, 3)), 2)
    x = features(kmap.n_in, 16, device=kernel_lane.device)
    dy = features(kmap.n_out, 16, 1, device=kernel_lane.device)
    batch = coords[:, 0].contiguous()
    for mode, *shifts in itertools.product(("max", "avg"), (0, 1), (0, 1)):
        rows, gradient = shifted(x, shifts[0]).requires_grad_(), shifted(dy, shifts[1])
        functional.pool(rows, kmap, mode).backward(gradient)
        functional.global_pool(rows, batch, 1, mode)
    assert keys


def test_shapes_and_dtypes(kernel_lane, keys):
    """Counts of 1, multiples of 16 and others, for everything that Triton specialises on."""
    for n, dimension in ((1, 1), (16, 2), (33, 1)):
        coords = cloud((4 * n,) if dimension == 1 else (n, 8), 1, 0.9)[: 2 * n]
        coords = coords.contiguous().to(kernel_lane.device)
        cmap = functional.coordinate_map(shifted(coords, n % 2))
        offsets = functional.kernel_offsets((3,) * dimension)
        maps = [functional.submanifold(cmap, offsets), functional.strided(cmap, offsets, 2)[1]]
        for kmap, c_in, c_out in itertools.product(maps, (1, 16, 17), (1, 16, 33)):
            for dtype in (torch.float32, torch.float16) if c_in == c_out else (torch.float32,):
                x = features(kmap.n_in, c_in, dtype=dtype, device=kernel_lane.device)
                weight = features(3**dimension * c_in, c_out, dtype=dtype, device=kernel_lane.device)
                weight = weight.view(-1, c_in, c_out).requires_grad_()
                functional.conv(x, weight, None, kmap).sum().backward()
    assert keys


def test_layouts(kernel_lane, keys):
    """Row and weight strides of every class, under one map."""
    coords = cloud(SHAPE, 1, 0.6, device=kernel_lane.device)
    cmap = functional.coordinate_map(coords, SHAPE, 1)
    kmap = functional.submanifold(cmap, functional.kernel_offsets((3, 3)))
    wide = torch.randn(len(coords), 64, device=kernel_lane.device)
    full = torch.randn(40, 9, 40, device=kernel_lane.device)
    for row, (a, b, c) in itertools.product((16, 32, 37), itertools.permutations(range(3))):
        x = wide[:, :row].contiguous()[:, :16]
        order = [full[:16, :, :32].permute(1, 0, 2), full[:16, :, 1:33].permute(1, 0, 2)]
        for weight in (*order, order[0].permute(a, b, c).contiguous().permute(*inverse(a, b, c))):
            leaf = weight.detach().requires_grad_()
            functional.conv(x, leaf, None, kmap).sum().backward()
    assert keys


def test_narrow_inputs(kernel_lane, keys):
    """Rows and weights of few channels at any address and distance."""
    coords = cloud(SHAPE, 1, 0.6, device=kernel_lane.device)
    cmap = functional.coordinate_map(coords, SHAPE, 1)
    kmap = functional.submanifold(cmap, functional.kernel_offsets((3, 3)))
    wide = torch.randn(len(coords), 48, device=kernel_lane.device)
    full = torch.randn(9, 48, 16, device=kernel_lane.device)
    with torch.no_grad():
        for c_in, row, by in itertools.product((1, 2, 3, 4), (1, 4, 16, 37), (0, 1)):
            x = wide[:, : max(row, c_in)].contiguous()[:, :c_in]
            last = full[:, :c_in].permute(2, 0, 1).contiguous()
            for weight in (full[:, :c_in], last.permute(1, 2, 0), shifted(full[:, :c_in], by)):
                functional.conv(x, weight, None, kmap)
    assert {name for name, _ in keys if name.endswith("_gemm")} == {"narrow_gemm"}


def test_tables(kernel_lane, keys):
    """Tables at any address."""
    target, device, n = target_of(kernel_lane), torch.device(kernel_lane.device), 33
    nbr = torch.arange(n, dtype=torch.int32, device=device).repeat(2, 1)
    x, weight = (features(*size, device=device) for size in ((n, 16), (2 * 16, 16)))
    w = layout_of(weight.view(2, 16, 16), "vio")
    product = Product(target, device, torch.float32, "ieee", w)
    spec = GemmSpec(product, TileConfig(64, 16, 16, 4, 2), False)
    for by in (0, 1, 4):
        gemm, y = GatherGemm(spec, shifted(nbr, by), n, n), torch.full_like(x, float("nan"))
        gemm(x, weight.view(2, 16, 16), None, y)
        assert_close(y, x.double() @ (weight[:16] + weight[16:]).double())
    assert len(keys) == 2, "one for every multiple of 16 bytes, one for all others"


def test_sorted_rows(kernel_lane, keys, rules):
    """Few and many, keys of both widths, all rows in use or not, coordinates at any address."""
    target = target_of(kernel_lane)
    for few, n, by, far in itertools.product((1 << 20, 0), (1, 16, 33), (0, 1), (0, 1 << 30)):
        rules.set(row_ranks, FEW_ROWS=few)
        coords = torch.arange(3 * n, dtype=torch.int32).view(n, 3)
        coords[:, 0] = 0
        box = Box.grid(1, (far or 3 * n, far or 3 * n))
        table = HashTable.allocate(64, box.key64, torch.device(kernel_lane.device))
        there = shifted(coords.to(kernel_lane.device), by)
        bounds = box.layout(there.device).bounds
        for count in (None, table.total):
            row_ranks.sort_rows(table, there, bounds, target, count)
    assert {name for name, _ in keys} == {"sort_keys", "rank_few", "move_sorted", "rename_values"}


def inverse(*order):
    return [order.index(i) for i in range(len(order))]


def test_storages_beyond_two_gigabytes(kernel_lane, keys):
    """AMD kernels address small tensors with 32-bit byte offsets; large ones need their own."""
    rows = torch.arange(5, device=kernel_lane.device)
    for n in (100, 1 << 24):
        x = torch.from_numpy(np.zeros((n, 64), np.float32)).to(kernel_lane.device)
        kmap = functional.kernel_map([(rows, rows)], n, 5)
        weight = torch.randn(1, 64, 16, device=kernel_lane.device, requires_grad=True)
        functional.conv(x, weight, None, kmap).sum().backward()
        functional.pool(x, kmap, "sum")
    assert keys


def test_classes_of_numbers():
    assert specialise(1, 16, 17, 0) == (1, 2, 0, 2)
    assert specialise(1 << 31, -(1 << 31), -(1 << 31) - 16) == (6, 2, 6)


def test_every_kernel_is_registered_once():

    for name, kernel in REGISTRY.items():
        assert kernel.name == name and kernel.fn.__name__ == "_" + name
