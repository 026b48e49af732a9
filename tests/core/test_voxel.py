"""Voxel operators against loops over Python numbers, on torch code and on kernels."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge.core.ops import voxel
from sparse_bridge.errors import DataTypeError, DeviceError, ShapeError
from tests import checks
from tests.conftest import _lanes

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]

# Both torch dataflows run the same code here, and both kernel dataflows the same kernels.
lanes = pytest.mark.parametrize(
    "lane", [one for one in _lanes() if one.values[0].dataflow in ("per_offset", "masked")], indirect=True
)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def numbers(shape, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def whole(shape, low, high, seed):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def mean_by_loop(feats, index, counts):
    y = torch.zeros(len(counts), feats.shape[1], dtype=torch.float64)
    for i, j in enumerate(index.tolist()):
        if 0 <= j < len(counts) and counts[j] > 0:
            y[j] += feats[i].double() / counts[j].item()
    return y


def mean_gradient(dy, index, counts):
    dx = torch.zeros(len(index), dy.shape[1], dtype=torch.float64)
    for i, j in enumerate(index.tolist()):
        if 0 <= j < len(counts) and counts[j] > 0:
            dx[i] = dy[j].double() / counts[j].item()
    return dx


def interpolate_by_loop(feats, index, weights):
    y = torch.zeros(len(index), feats.shape[1], dtype=torch.float64)
    for i, row in enumerate(index.tolist()):
        for k, j in enumerate(row):
            if 0 <= j < len(feats):
                y[i] += weights[i, k].double() * feats[j].double()
    return y


def interpolate_gradient(dy, index, weights, n_voxels):
    dx = torch.zeros(n_voxels, dy.shape[1], dtype=torch.float64)
    for i, row in enumerate(index.tolist()):
        for k, j in enumerate(row):
            if 0 <= j < n_voxels:
                dx[j] += weights[i, k].double() * dy[i].double()
    return dx


# Points, voxels, channels: one entry a voxel, a few, many; odd channels; around the kernels' tiles.
SIZES = [(1, 1, 1), (31, 40, 3), (33, 9, 17), (97, 1, 5), (200, 3, 33), (65, 64, 130)]


@lanes
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n, m, c", SIZES)
def test_voxelize(lane, n, m, c, dtype):
    if lane.slow and n * c > 2000:
        pytest.skip("the larger tiles run on other lanes")
    feats = numbers((n, c), 1, dtype)
    index = whole((n,), -1, m + 1, 2)
    counts = voxel.count(index, m)
    counts[m // 2] = 0 if m > 2 else counts[m // 2]
    x = feats.to(lane.device).requires_grad_()
    y = voxel.voxelize(x, index.to(lane.device), counts.to(lane.device))
    assert y.dtype == dtype
    checks.assert_close(y, mean_by_loop(feats, index, counts), dtype)
    dy = numbers((m, c), 3, dtype)
    y.backward(dy.to(lane.device))
    checks.assert_close(x.grad, mean_gradient(dy, index, counts), dtype, "gradient")


@lanes
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n, m, c", SIZES)
def test_devoxelize(lane, n, m, c, dtype):
    if lane.slow and n * c > 2000:
        pytest.skip("the larger tiles run on other lanes")
    feats, weights = numbers((m, c), 4, dtype), numbers((n, 8), 5, dtype)
    index = whole((n, 8), -1, m + 1, 6)
    x = feats.to(lane.device).requires_grad_()
    y = voxel.devoxelize(x, index.to(lane.device), weights.to(lane.device))
    assert y.dtype == dtype
    checks.assert_close(y, interpolate_by_loop(feats, index, weights), dtype)
    dy = numbers((n, c), 7, dtype)
    y.backward(dy.to(lane.device))
    checks.assert_close(x.grad, interpolate_gradient(dy, index, weights, m), dtype, "gradient")


@lanes
def test_layouts_and_index_types(lane):
    """Strided features and upstream gradients, int32 and int64 indices, one corner a point, fp32
    weights for fp16."""
    feats, weights = numbers((20, 12), 8, torch.float16), numbers((15, 1), 9, torch.float32)
    index = whole((15, 1), -1, 20, 10)
    want = interpolate_by_loop(feats, index, weights)
    wide = feats.repeat_interleave(2, 1).to(lane.device)[:, ::2]
    assert not wide.is_contiguous()
    for kind in (torch.int32, torch.int64):
        y = voxel.devoxelize(wide, index.to(lane.device, kind), weights.to(lane.device))
        checks.assert_close(y, want, torch.float16)
    x = numbers((15, 3), 11, torch.float32).to(lane.device).requires_grad_()
    counts = voxel.count(index[:, 0], 20).to(lane.device)
    # the gradient of a sum is expanded from a scalar: strides of 0
    voxel.voxelize(x, index[:, 0].to(lane.device), counts).sum().backward()
    want = mean_gradient(torch.ones(20, 3), index[:, 0], counts)
    checks.assert_close(x.grad, want, torch.float32)


@lanes
def test_nothing_to_do(lane):
    device = lane.device
    none = torch.zeros(0, dtype=torch.int64, device=device)
    counts = torch.zeros(3, dtype=torch.int32, device=device)
    x = torch.zeros(0, 5, device=device, requires_grad=True)
    y = voxel.voxelize(x, none, counts)
    assert y.shape == (3, 5) and not y.any()
    y.sum().backward()
    assert x.grad.shape == (0, 5)
    feats = torch.ones(4, 0, device=device)
    assert voxel.voxelize(feats, torch.zeros(4, dtype=torch.int32, device=device), counts).shape == (3, 0)
    x = torch.ones(4, 2, device=device, requires_grad=True)
    y = voxel.devoxelize(x, none.view(0, 8), torch.zeros(0, 8, device=device))
    assert y.shape == (0, 2)
    y.sum().backward()
    assert not x.grad.any()
    empty = voxel.devoxelize(
        torch.zeros(0, 2, device=device), torch.full((3, 8), -1, device=device), torch.ones(3, 8, device=device)
    )
    assert empty.shape == (3, 2) and not empty.any()
    assert voxel.trilinear_weights(torch.zeros(0, 3, device=device), none.view(0, 8)).shape == (0, 8)
    assert voxel.count(none, 0).shape == (0,) and voxel.count(none, 2).tolist() == [0, 0]


@lanes
def test_dropped_entries_do_not_read_their_source(lane):
    """A NaN that no index names stays out, and so does one behind a missing corner."""
    feats = torch.tensor([[1.0], [float("nan")]], device=lane.device)
    index = torch.tensor([[0, -1], [0, 2]], device=lane.device)
    weights = torch.tensor([[0.5, float("nan")], [1.0, float("nan")]], device=lane.device)
    y = voxel.devoxelize(feats, index, weights)
    assert y.flatten().tolist() == [0.5, 1.0]


@lanes
@pytest.mark.parametrize("scale", [1, 2, 4, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_trilinear_weights(lane, scale, dtype):
    coords = numbers((130, 4), 12, dtype) * 9
    index = whole((130, 8), -1, 6, 13)
    index[0] = -1
    want = torch.zeros(130, 8, dtype=torch.float64)
    for i, (x, y, z, _) in enumerate(coords.double().tolist()):
        parts = [(c - c // scale * scale) / scale for c in (x, y, z)]
        for k in range(8):
            bits = (k >> 2 & 1, k >> 1 & 1, k & 1)
            w = 1.0
            for part, bit in zip(parts, bits, strict=True):
                w *= part if bit else 1 - part
            want[i, k] = w if index[i, k] >= 0 else 0.0
        want[i] /= want[i].sum() + 1e-8
    got = voxel.trilinear_weights(coords.to(lane.device), index.to(lane.device), scale)
    assert got.dtype == dtype and not got[0].any()
    checks.assert_close(got, want, torch.float32 if dtype == torch.float32 else torch.float64)
    columns = coords.to(lane.device)[:, 1:]
    shifted = voxel.trilinear_weights(columns, index.to(lane.device), scale)
    again = voxel.trilinear_weights(columns.contiguous(), index.to(lane.device), scale)
    assert torch.equal(shifted, again), "a slice of columns counts from its own first one"
    narrow = voxel.trilinear_weights(columns, index.int().to(lane.device), scale)
    torch.testing.assert_close(narrow, again)


@lanes
def test_known_trilinear_weights(lane):
    point = torch.tensor([[2.5, 1.0, 3.5]], device=lane.device)
    index = torch.zeros(1, 8, dtype=torch.int32, device=lane.device)
    got = voxel.trilinear_weights(point, index, 2)[0].tolist()
    want = [0.09375, 0.28125, 0.09375, 0.28125, 0.03125, 0.09375, 0.03125, 0.09375]
    assert got == pytest.approx(want, abs=1e-6)


@lanes
def test_count(lane):
    index = whole((3000,), -2, 12, 21)
    want = [int((index == v).sum()) for v in range(10)]
    for kind in (torch.int32, torch.int64):
        got = voxel.count(index.to(lane.device, kind), 10)
        assert got.dtype == torch.int32 and got.tolist() == want


@lanes
def test_same_bits_on_every_run(lane):
    feats = numbers((400, 7), 22, torch.float32).to(lane.device)
    index = whole((400,), 0, 9, 23).to(lane.device)
    counts = voxel.count(index, 9)
    corners = whole((400, 8), -1, 9, 24).to(lane.device)
    weights = numbers((400, 8), 25, torch.float32).to(lane.device)

    def run():
        x = feats.clone().requires_grad_()
        y = voxel.voxelize(x, index.clone(), counts)
        z = voxel.devoxelize(y, corners.clone(), weights)
        z.backward(feats)
        return y.detach(), z.detach(), x.grad

    for first, again in zip(run(), run(), strict=True):
        assert torch.equal(first, again)


def test_gradcheck():
    index, counts = whole((9,), -1, 4, 26), torch.tensor([2, 1, 3, 0])
    corners, weights = whole((6, 8), -1, 4, 27), numbers((6, 8), 28)
    x = numbers((9, 3), 29).requires_grad_()

    def network(x):
        return voxel.devoxelize(voxel.voxelize(x, index, counts), corners, weights)

    assert torch.autograd.gradcheck(network, (x,))


def test_sorting_is_shared_by_calls_with_one_index():
    index = whole((50,), 0, 5, 30)
    assert voxel.column_of(index) is voxel.column_of(index)
    column = voxel.column_of(index)
    assert voxel.segments_of(column, 5) is voxel.segments_of(column, 5)
    assert voxel.segments_of(column, 5) is not voxel.segments_of(column, 4)
    kept = voxel.segments_of(column, 5)
    index[0] = (index[0] + 1) % 5
    assert voxel.segments_of(voxel.column_of(index), 5) is not kept, "an index changed in place is sorted anew"


def test_autocast_leaves_precision_alone():
    feats = torch.full((2, 1), 4097.0)
    with torch.autocast("cpu", torch.bfloat16):
        y = voxel.voxelize(feats, torch.tensor([0, 0]), torch.tensor([2]))
    assert y.dtype == torch.float32 and y.item() == 4097.0


def test_bad_input():
    x, one = torch.ones(4, 2), torch.ones(4, dtype=torch.int64)
    counts = torch.ones(3, dtype=torch.int32)
    with pytest.raises(ShapeError, match=r"features \[4, 2\], indices \[3\]"):
        voxel.voxelize(x, one[:3], counts)
    with pytest.raises(ShapeError, match=r"shape \[4\]"):
        voxel.voxelize(x[:, 0], one, counts)
    with pytest.raises(DataTypeError, match=r"features of shape .* torch.int64"):
        voxel.voxelize(x.long(), one, counts)
    with pytest.raises(DataTypeError, match=r"indices of torch.float32"):
        voxel.voxelize(x, one.float(), counts)
    with pytest.raises(DeviceError, match=r"on cpu, indices on meta"):
        voxel.voxelize(x, one.to("meta"), counts)
    with pytest.raises(ShapeError, match=r"expected \[N, K\]"):
        voxel.devoxelize(x, torch.zeros(8, 5, dtype=torch.int32), torch.ones(5, 8))
    with pytest.raises(DataTypeError, match=r"weights of torch.int64"):
        voxel.devoxelize(x, torch.zeros(5, 8, dtype=torch.int32), torch.ones(5, 8).long())
    with pytest.raises(ShapeError, match=r"points \[5, 2\]"):
        voxel.trilinear_weights(torch.ones(5, 2), torch.zeros(5, 8, dtype=torch.int32))
    with pytest.raises(DataTypeError, match="float32"):
        voxel.count(x, 3)
    with pytest.raises(ShapeError, match="-1 values"):
        voxel.count(one, -1)
