"""Convolutions of every release against dictionaries of Python integers."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge import settings
from tests import checks
from tests.clouds import cloud

from . import oracle
from .conftest import DEVICES

ONE, TWO = (1, 1, 1), (2, 2, 2)


def points(release, shape=(6, 5, 7), batch=2, share=0.3, seed=0, low=(0, 0, 0), scale=ONE):
    """Distinct coordinates in the release's layout, moved by `low` and times `scale`."""
    rows = cloud(shape, batch, share, seed)
    rows[:, 1:] = rows[:, 1:] * torch.tensor(scale) + torch.tensor(low)
    rows = rows.int()
    return rows if release == "2.1" else rows[:, [1, 2, 3, 0]].contiguous()


def triple(n):
    return n if isinstance(n, tuple) else (n,) * 3


def weights(kernel, c_in, c_out, dtype=torch.float64):
    volume = kernel[0] * kernel[1] * kernel[2]
    return torch.randn(volume, c_in, c_out, dtype=dtype) / (volume * c_in) ** 0.5


def check(
    ts,
    coords,
    kernel,
    stride=1,
    padding=0,
    c_in=3,
    c_out=5,
    tensor_stride=ONE,
    extent=None,
    batch=2,
    device="cpu",
    config=None,
    mode="otf",
    rule="spconv",
    dtype=torch.float64,
):
    """A convolution and its transposed one, forward and backward, beside fp64."""
    F = ts.nn.functional
    kernel, stride, padding = triple(kernel), triple(stride), triple(padding)
    sites = oracle.to_sites(coords, ts.release)
    want_sites, triples = oracle.layer(sites, kernel, stride, padding, tensor_stride, ts.release, extent, mode, rule)
    feats, weight = torch.randn(len(coords), c_in).to(dtype), weights(kernel, c_in, c_out).to(dtype)
    bias = torch.randn(c_out).to(dtype)
    leaves = [t.double().clone().requires_grad_() for t in (feats, weight, bias)]
    want = oracle.product(*leaves, triples, len(want_sites))
    up = torch.randn(want.shape).to(dtype)
    if len(want):
        want.backward(up.double())
    options = {"stride": stride}
    if ts.release == "2.1":
        options |= {"padding": padding, "config": config}
    more = {} if extent is None else {"spatial_range": (batch, *extent)}
    ours = [t.clone().to(device).requires_grad_() for t in (feats, weight, bias)]
    x = ts.SparseTensor(ours[0], coords.to(device), tensor_stride, **more)
    y = F.conv3d(x, ours[1], kernel, ours[2], **options)
    assert oracle.to_sites(y.coords, ts.release) == want_sites
    checks.assert_close(y.feats, want, dtype, "forward")
    assert y.stride == tuple(t * s for t, s in zip(tensor_stride, stride, strict=True))
    y.feats.backward(up.to(device))
    for name, one, other in zip(("features", "weight", "bias"), ours, leaves, strict=True):
        grad = torch.zeros_like(other) if other.grad is None else other.grad
        checks.assert_close(one.grad, grad, dtype, f"gradient of the {name}")
    back = torch.randn(weight.shape[0], c_out, 4).to(dtype)
    z = F.conv3d(_detached(ts, y), back.to(device), kernel, **options, transposed=True)
    given = y.feats.detach().cpu().double()
    want = oracle.product(given, back.double(), None, triples, len(coords), flipped=True)
    checks.assert_close(z.feats, want, dtype, "transposed")
    assert torch.equal(z.coords.cpu(), coords) and z.stride == tensor_stride
    return y


def _detached(ts, y):
    clone = ts.SparseTensor(y.feats.detach(), y.coords, y.stride)
    clone.cmaps, clone.kmaps = y.cmaps, y.kmaps
    return clone


SUBMANIFOLD = [3, 2, 5, 4, (3, 1, 3), (1, 3, 1), (3, 1, 2), (2, 1, 1), (1, 1, 3), (2, 3, 5), (4, 1, 3)]


@pytest.mark.parametrize("kernel", SUBMANIFOLD, ids=str)
def test_stride_one(ts, kernel):
    check(ts, points(ts.release), kernel)


STRIDED = [
    # kernel, stride, padding
    (2, 2, 0),
    (3, 2, 1),
    (3, 2, 0),
    (3, 3, 0),
    (2, 1, 0),
    (1, 2, 0),
    (5, 2, 2),
    (4, 2, 1),
    (2, 3, 0),
    (3, 4, 2),
    ((3, 1, 1), (2, 1, 1), 0),
    ((1, 3, 1), (1, 2, 1), 0),
    (3, (1, 2, 2), (0, 1, 1)),
    ((2, 2, 1), (2, 2, 1), 0),
    ((3, 2, 1), (2, 2, 3), (1, 0, 0)),
    (2, (2, 1, 2), 1),
    ((4, 2, 3), (3, 1, 2), (2, 1, 0)),
    (7, 3, 3),
]


@pytest.mark.parametrize("geometry", STRIDED, ids=str)
def test_strided(ts, geometry):
    for seed in (1, 2):
        check(ts, points(ts.release, seed=seed, share=0.2), *geometry)


@pytest.mark.parametrize("geometry", STRIDED[:12], ids=str)
@pytest.mark.parametrize("extent", [(6, 5, 7), (7, 8, 9), (8, 6, 8)], ids=str)
def test_spatial_range(ts21, geometry, extent):
    ts21.release = "2.1"
    kernel, stride, padding = (triple(n) for n in geometry)
    y = check(ts21, points("2.1", seed=3), kernel, stride, padding, extent=extent)
    grid = [(e + 2 * p - (k - 1) - 1) // s + 1 for e, k, s, p in zip(extent, kernel, stride, padding, strict=True)]
    assert y.spatial_range == (2, *grid)


@pytest.mark.parametrize("geometry", STRIDED[:14], ids=str)
@pytest.mark.parametrize("rule", ["spconv", "minkowski"])
def test_hashmap_mode(ts21, geometry, rule):
    ts21.release = "2.1"
    config = ts21.nn.functional.conv_config.get_default_conv_config().copy()
    config.kmap_mode, config.downsample_mode = "hashmap", rule
    options = {"config": config, "mode": "hashmap", "rule": rule}
    low = (-4, -3, -2) if rule == "minkowski" else (0, 0, 0)
    check(ts21, points("2.1", seed=4, low=low), *geometry, **options)


@pytest.mark.parametrize("kernel", [2, 4, (3, 1, 2), 3], ids=str)
def test_hashmap_mode_without_stride(ts21, kernel):
    ts21.release = "2.1"
    config = {"kmap_mode": "hashmap"}
    check(ts21, points("2.1", seed=5), kernel, config=config, mode="hashmap")


@pytest.mark.parametrize("kernel", [3, 2, (1, 3, 2)], ids=str)
def test_negative_coordinates_without_stride(ts, kernel):
    check(ts, points(ts.release, seed=6, low=(-3, -9, 2)), kernel)


@pytest.mark.parametrize("geometry", [(2, 2), (3, 3), (3, 2), (2, (2, 1, 2)), (4, 2)], ids=str)
@pytest.mark.parametrize("release", ["1.4", "2.0"])
def test_negative_coordinates_with_stride_in_old_releases(geometry, release):
    from .conftest import speaking

    with speaking(release) as ts:
        ts.release = release
        check(ts, points(release, seed=7, low=(-3, -4, 2)), *geometry)


@pytest.mark.parametrize("geometry", [(2, 2, 0), (3, 2, 1), (3, 2, 0), (5, 3, 2)], ids=str)
def test_negative_coordinates_with_stride(ts21, geometry):
    """2.1's own answer is undefined; here the grid extends downwards: moving everything by a
    multiple
    of the stride moves the outputs along."""
    kernel, stride, padding = (triple(n) for n in geometry)
    F, coords = ts21.nn.functional, points("2.1", seed=8)
    feats, weight = torch.randn(len(coords), 3), weights(kernel, 3, 4, torch.float32)
    moved = coords - torch.tensor([0, *(8 * s for s in stride)], dtype=torch.int32)
    one, other = (
        F.conv3d(ts21.SparseTensor(feats, c), weight, kernel, stride=stride, padding=padding) for c in (coords, moved)
    )
    shift = torch.tensor([0, 8, 8, 8], dtype=torch.int32)
    found = {tuple(r): f for r, f in zip((other.C + shift).tolist(), other.F, strict=True)}
    for row, feat in zip(one.C.tolist(), one.F, strict=True):
        torch.testing.assert_close(found[tuple(row)], feat)


@pytest.mark.parametrize("release", ["1.4", "2.0"])
@pytest.mark.parametrize("geometry", [(3, 1), (2, 2), (3, 2), (5, 1), ((3, 1, 2), 1)], ids=str)
@pytest.mark.parametrize("tensor_stride", [TWO, (4, 4, 4), (1, 2, 4)], ids=str)
def test_coarse_tensors_of_old_releases(geometry, tensor_stride, release):
    """Coordinates are multiples of the tensor stride; kernels step by it."""
    from .conftest import speaking

    with speaking(release) as ts:
        ts.release = release
        coords = points(release, seed=9, scale=tensor_stride)
        check(ts, coords, *geometry, tensor_stride=tensor_stride)


@pytest.mark.parametrize("low", [0, -9])
@pytest.mark.parametrize(
    "layers",
    [
        [(2, 2), (2, 2), (2, 2)],
        [(3, 3), (2, 2), (3, 2)],
        [(2, (2, 1, 2)), ((1, 2, 1), (1, 2, 1))],
        [(3, 2), (2, 2), (2, 2)],
    ],
    ids=str,
)
@pytest.mark.parametrize("release", ["1.4", "2.0"])
def test_levels_of_old_releases_do_not_need_their_history(release, layers, low):
    """Coordinates of our own making are known to be multiples of the tensor stride; a copy's are
    not."""
    from .conftest import speaking

    with speaking(release) as ts:
        coords = points(release, seed=3)
        coords[:, :3] = coords[:, :3] * 3 + low
        x = ts.SparseTensor(torch.randn(len(coords), 4), coords)
        for kernel, stride in layers:
            copied = ts.SparseTensor(x.F, x.C.clone(), x.s)
            conv = ts.nn.Conv3d(4, 4, kernel, stride=stride)
            x, want = conv(x), conv(copied)
            assert x.s == want.s and torch.equal(x.C, want.C)
            torch.testing.assert_close(x.F, want.F)
        assert len(x.C) > 1


@pytest.mark.parametrize("channels", [(1, 1), (3, 17), (33, 2), (64, 64)], ids=str)
def test_channels(ts, channels):
    check(ts, points(ts.release, seed=10), 3, 1, 0, *channels)
    check(ts, points(ts.release, seed=10), 2, 2, 0, *channels)


@pytest.mark.parametrize("n", [0, 1, 2, 31, 32, 33, 63, 64, 65])
def test_row_counts(ts, n):
    coords = points(ts.release, seed=11, share=0.5)[:n].contiguous()
    check(ts, coords, 3)
    check(ts, coords, 2, 2)
    check(ts, coords, 3, 2, 1)


def test_batches(ts):
    """Items without points, in between and at the end, and a first index that is not 0."""
    rows = points("2.1", batch=5, seed=12)
    for kept in ([0, 3], [2], [1, 2, 4]):
        some = torch.cat([rows[rows[:, 0] == b] for b in kept])
        some = some if ts.release == "2.1" else some[:, [1, 2, 3, 0]].contiguous()
        check(ts, some, 3)
        check(ts, some, 2, 2)


def test_far_apart(ts):
    """Extents whose product leaves 64 bits; keys must not wrap."""
    near = points("2.1", shape=(3, 3, 3), seed=13, share=0.6)
    far = near.clone()
    far[:, 1:] += torch.tensor([2_000_000_000, 1_500_000_001, 2_100_000_000], dtype=torch.int32)
    rows = torch.cat([near, far])
    rows = rows if ts.release == "2.1" else rows[:, [1, 2, 3, 0]].contiguous()
    check(ts, rows, 3)
    check(ts, rows, 2, 2)


def test_large_kernel(ts):
    check(ts, points(ts.release, shape=(9, 9, 9), batch=1, share=0.1, seed=14), 7)


@pytest.mark.parametrize("kernel", [3, 2], ids=str)
def test_many_rows(ts, kernel):
    """Enough pairs a row for the CPU's merged products, forwards and backwards."""
    check(ts, points(ts.release, shape=(11, 10, 9), share=0.6, seed=15), kernel)
    check(ts, points(ts.release, shape=(11, 10, 9), share=0.6, seed=15), kernel, 2)


def test_the_tail_can_be_kept(ts21):
    """k 2, s 2 without a range drops the last cell of an axis whose largest coordinate is even."""
    coords = torch.tensor([[0, 0, 0, 0], [0, 4, 1, 1], [0, 3, 3, 3]], dtype=torch.int32)
    feats, conv = torch.randn(3, 2), ts21.nn.Conv3d(2, 3, 2, stride=2)
    assert conv(ts21.SparseTensor(feats, coords)).C.tolist() == [[0, 0, 0, 0], [0, 1, 1, 1]]
    with settings.override(torchsparse_keep_tail=True):
        y = conv(ts21.SparseTensor(feats, coords))
        assert y.C.tolist() == [[0, 0, 0, 0], [0, 1, 1, 1], [0, 2, 0, 0]]
        y = conv(ts21.SparseTensor(feats, coords, spatial_range=(1, 5, 4, 4)))
        assert len(y.C) == 3 and y.spatial_range == (1, 3, 2, 2)


def test_dropped_inputs_come_back_as_bias(ts21):
    coords = torch.tensor([[0, 0, 0, 0], [0, 4, 1, 1]], dtype=torch.int32)
    down, up = (ts21.nn.Conv3d(2, 3, 2, stride=2), ts21.nn.Conv3d(3, 2, 2, 2, bias=True, transposed=True))
    z = up(down(ts21.SparseTensor(torch.randn(2, 2), coords)))
    assert torch.equal(z.C, coords) and torch.equal(z.F[1], up.bias.detach())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kernel, stride", [(3, 1), (2, 2), (3, 2), (2, 1)])
def test_on_devices(ts, kernel, stride, device):
    check(ts, points(ts.release, shape=(9, 8, 10), seed=18), kernel, stride, kernel // 2, device=device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kernel, stride", [(3, 1), (2, 2), (3, 2), (2, 1), (1, 1)])
def test_precisions_on_a_gpu(ts, kernel, stride, dtype):
    """The kernels against fp64 on rounded inputs, both gradients included."""
    F, coords = ts.nn.functional, points(ts.release, shape=(16, 14, 15), seed=19).cuda()
    feats = torch.randn(len(coords), 24).to(dtype)
    weight = weights(triple(kernel), 24, 40, torch.float32).to(dtype)

    def run(precision, device):
        x, w = (t.to(device, precision).requires_grad_() for t in (feats, weight))
        y = F.conv3d(ts.SparseTensor(x, coords.to(device)), w, kernel, stride=stride)
        y.F.backward(torch.ones_like(y.F))
        return y.F, x.grad, w.grad

    with settings.override(dataflow="explicit"):
        want = run(torch.float64, "cpu")
    for got, other in zip(run(dtype, "cuda"), want, strict=True):
        assert got.dtype == dtype
        checks.assert_close(got, other, dtype)
