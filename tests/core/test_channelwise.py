"""Depthwise convolution and first-maximum pooling, against loops over pairs in fp64."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge.core.conv.depthwise import channelwise
from sparse_bridge.core.geometry.boxes import Box
from sparse_bridge.core.geometry.offsets import box_offsets
from sparse_bridge.core.maps import map_builder
from sparse_bridge.core.maps.coordinate_map import CoordinateMap
from sparse_bridge.core.ops.max_rows import list_max, window_max
from sparse_bridge.errors import DataTypeError, ShapeError
from tests import checks, oracle
from tests.clouds import cloud, features

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def make_map(kind, lane, rows=None, seed=0):
    """(kernel map, its pairs); "same" is symmetric, "even" is not, "down" has stride 2."""
    coords = cloud((5, 6, 4), 2, 0.4, seed, lane.device)
    coords = coords if rows is None else coords[:rows].contiguous()
    box = Box.spanning((0, -2, -2, -2), (2, 12, 12, 12))
    cmap = CoordinateMap(coords, box)
    if kind == "down":
        offsets = box_offsets((3, 3, 3), (1, 1, 1), (1, 1, 1))
        return map_builder.strided(cmap, offsets, (2, 2, 2), box)[1]
    kernel = (3, 3, 3) if kind == "same" else (2, 1, 2)
    origin = (1, 1, 1) if kind == "same" else (0, 0, 0)
    return map_builder.submanifold(cmap, box_offsets(kernel, (1, 1, 1), origin))


def reference(kmap, x, w, dy):
    """fp64 (y, dx, dw)."""
    x, w, dy = (t.detach().double().cpu() for t in (x, w, dy))
    y, dx, dw = torch.zeros_like(dy), torch.zeros_like(x), torch.zeros_like(w)
    for v, i, j in oracle.triples(kmap):
        y[j] += x[i] * w[v]
        dx[i] += dy[j] * w[v]
        dw[v] += dy[j] * x[i]
    return y, dx, dw


def leaves(kmap, channels, dtype, device, seed=0):
    x = features(kmap.n_in, channels, seed, dtype, device).requires_grad_()
    w = features(kmap.n_offsets, channels, seed + 5, dtype, device).requires_grad_()
    return x, w, features(kmap.n_out, channels, seed + 9, dtype, device)


@pytest.mark.parametrize("kind", ["same", "even", "down"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_and_gradients(map_lane, kind, transposed, dtype):
    if map_lane.slow and dtype != torch.float32 and kind != "even":
        pytest.skip("one map is enough for this dtype here")
    kmap = make_map(kind, map_lane)
    kmap = kmap.transposed() if transposed else kmap
    channels = 17 if map_lane.slow else 33
    x, w, dy = leaves(kmap, channels, dtype, map_lane.device)
    y = channelwise(x, w, kmap)
    y.backward(dy)
    assert y.dtype == x.grad.dtype == w.grad.dtype == dtype
    for got, want, what in zip((y, x.grad, w.grad), reference(kmap, x, w, dy), ("y", "dx", "dw"), strict=True):
        checks.assert_close(got, want, dtype, what)


@pytest.mark.parametrize("rows", [0, 1, 31, 32, 33])
@pytest.mark.parametrize("channels", [1, 3, 130])
def test_edges_of_tiles(map_lane, rows, channels):
    if map_lane.slow and (channels == 130 and rows != 33):
        pytest.skip("one row count is enough for wide channels here")
    kmap = make_map("same", map_lane, rows)
    x, w, dy = leaves(kmap, channels, torch.float32, map_lane.device, seed=3)
    y = channelwise(x, w, kmap)
    y.backward(dy)
    for got, want in zip((y, x.grad, w.grad), reference(kmap, x, w, dy), strict=True):
        checks.assert_close(got, want)


def test_strided_weights_and_repeatability(map_lane):
    kmap = make_map("same", map_lane)
    x, w, dy = leaves(kmap, 8, torch.float32, map_lane.device)
    turned = w.detach().t().contiguous().t().requires_grad_()
    assert not turned.is_contiguous()
    results = []
    for weight in (turned, w, turned):
        x.grad = weight.grad = None
        y = channelwise(x, weight, kmap)
        y.backward(dy)
        results.append((y.detach(), x.grad, weight.grad))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_double_precision_gradcheck():
    coords = cloud((3, 3), 1, 0.7)
    cmap = CoordinateMap(coords, Box.grid(1, (3, 3)))
    kmap = map_builder.submanifold(cmap, box_offsets((3, 3), (1, 1), (1, 1)))
    x = torch.randn(len(coords), 2, dtype=torch.float64, requires_grad=True)
    w = torch.randn(9, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *a: channelwise(*a, kmap), (x, w))
    assert torch.autograd.gradcheck(lambda a: window_max(a, kmap), (x,))


def test_autocast(map_lane):
    kmap = make_map("even", map_lane)
    x, w, _ = leaves(kmap, 5, torch.float32, map_lane.device)
    with torch.autocast(map_lane.device, dtype=torch.bfloat16):
        y = channelwise(x, w, kmap)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype == w.grad.dtype == torch.float32


def test_wrong_arguments():
    coords = cloud((3, 3), 1, 0.7)
    cmap = CoordinateMap(coords, Box.grid(1, (3, 3)))
    kmap = map_builder.submanifold(cmap, box_offsets((3, 3), (1, 1), (1, 1)))
    x, w = torch.randn(len(coords), 2), torch.randn(9, 2)
    with pytest.raises(ShapeError, match="rows"):
        channelwise(x[1:], w, kmap)
    with pytest.raises(ShapeError, match="offsets, channels"):
        channelwise(x, w[:, :1], kmap)
    with pytest.raises(DataTypeError, match="convert one"):
        channelwise(x, w.double(), kmap)
    with pytest.raises(DataTypeError, match="floating point"):
        channelwise(x.int(), w, kmap)
    with pytest.raises(ShapeError, match="rows"):
        window_max(x[1:], kmap)


def max_reference(triples, x, n_out):
    """(maxima, smallest rows that hold them, -1 for none), a NaN above all."""
    windows = {}
    for _, i, j in triples:
        windows.setdefault(j, set()).add(i)
    y = torch.zeros(n_out, x.shape[1], dtype=torch.float64)
    row = torch.full(y.shape, -1)
    for j, window in windows.items():
        ordered = sorted(window)
        values = x.detach().double().cpu()[ordered]
        for c in range(x.shape[1]):
            column = values[:, c]
            nan = column.isnan().nonzero()
            k = int(nan[0]) if len(nan) else int((column == column.max()).nonzero()[0])
            y[j, c], row[j, c] = column[k], ordered[k]
    return y, row


@pytest.mark.parametrize("kind", ["same", "down"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_window_max_gives_its_gradient_to_the_first_row(map_lane, kind, dtype):
    kmap = make_map(kind, map_lane, seed=4)
    # Few distinct values, so that most windows tie; some are negative throughout.
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-3, 1, (kmap.n_in, 19), generator=generator).to(dtype)
    x[3, 5] = float("nan")
    x = x.to(map_lane.device).requires_grad_()
    y = window_max(x, kmap)
    dy = features(kmap.n_out, 19, 2, dtype, map_lane.device)
    y.backward(dy)
    want, row = max_reference(oracle.triples(kmap), x, kmap.n_out)
    assert torch.equal(y.detach().double().cpu().nan_to_num(99), want.nan_to_num(99))
    dx = torch.zeros(x.shape, dtype=torch.float64)
    j, c = (row >= 0).nonzero(as_tuple=True)
    dx.index_put_((row[j, c], c), dy.double().cpu()[j, c], accumulate=True)
    checks.assert_close(x.grad, dx, dtype)


def test_windows_without_input_give_zero(map_lane):
    coords = torch.tensor([[0, 0, 0], [0, 1, 0]], dtype=torch.int32, device=map_lane.device)
    far = torch.tensor([[0, 9, 9], [0, 1, 1]], dtype=torch.int32, device=map_lane.device)
    box = Box.grid(1, (12, 12))
    offsets = box_offsets((3, 3), (1, 1), (1, 1))
    kmap = map_builder.between(CoordinateMap(coords, box), CoordinateMap(far, box), offsets, (1, 1))
    x = torch.tensor([[-5.0], [-7.0]], device=map_lane.device, requires_grad=True)
    y = window_max(x, kmap)
    y.sum().backward()
    assert y.tolist() == [[0.0], [-5.0]] and x.grad.tolist() == [[1.0], [0.0]]


def test_list_max_of_any_pairs(map_lane):
    generator = torch.Generator().manual_seed(5)
    in_rows = torch.randint(0, 20, (90,), generator=generator)
    out_rows = torch.randint(0, 12, (90,), generator=generator)
    x = torch.randint(-4, 2, (20, 3), generator=generator).float()
    x = x.to(map_lane.device).requires_grad_()
    y = list_max(x, in_rows.to(x.device), out_rows.to(x.device), 13)
    dy = features(13, 3, 8, device=map_lane.device)
    y.backward(dy)
    triples = {(0, i, j) for i, j in zip(in_rows.tolist(), out_rows.tolist(), strict=True)}
    want, row = max_reference(triples, x, 13)
    assert torch.equal(y.detach().double().cpu(), want)
    dx = torch.zeros(20, 3, dtype=torch.float64)
    j, c = (row >= 0).nonzero(as_tuple=True)
    dx.index_put_((row[j, c], c), dy.double().cpu()[j, c], accumulate=True)
    checks.assert_close(x.grad, dx)
