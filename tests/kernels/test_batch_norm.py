"""The batch norm kernels against fp64, into memory full of NaN."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge.kernels.ops.batch_norm import batch_norm_forward
from sparse_bridge.kernels.ops.batch_norm_grad import batch_norm_backward
from sparse_bridge.kernels.ops.norm_spec import spec_of
from tests.checks import assert_close
from tests.clouds import features
from tests.kernels.calls import target_of

from .test_launch_keys import shifted

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]

CASES = [
    (2, 1, torch.float32),
    (2, 33, torch.float16),
    (127, 3, torch.float32),
    (128, 40, torch.float16),
    (129, 5, torch.bfloat16),
    (255, 32, torch.float32),
    (256, 16, torch.bfloat16),
    (513, 16, torch.float16),
    (1500, 33, torch.float32),
    (3001, 64, torch.float16),
    (40, 1024, torch.float16),
]


class Layer:
    """Tensors of one layer on a lane's device, and what torch makes of them in fp64."""

    def __init__(self, lane, n, channels, dtype, offset=100.0, vectors=torch.float32, spare=0):
        self.lane, self.n, self.target = lane, n, target_of(lane)
        x = (features(n, channels) * (1 + features(1, channels, 1).abs()) + offset).to(dtype)
        behind = torch.full((spare, channels), float("nan"), dtype=dtype)
        self.x = torch.cat([x, behind]).to(lane.device)
        self.dy = torch.cat([features(n, channels, 2, dtype), behind]).to(lane.device)
        self.gain, self.beta, self.mean = (features(1, channels, seed, vectors, lane.device)[0] for seed in (3, 4, 5))
        self.var, self.batches = self.mean.abs() + 1, torch.tensor(7, device=lane.device)
        self.count = torch.tensor([n - 1], dtype=torch.int32, device=lane.device)
        self.count = self.count if spare else None
        self.want = self.reference()

    def reference(self):
        x, dy, gain, beta, mean, var = (
            t.cpu().double() for t in (self.x[: self.n], self.dy[: self.n], self.gain, self.beta, self.mean, self.var)
        )
        for leaf in (x, gain, beta):
            leaf.requires_grad_()
        y = torch.nn.functional.batch_norm(x, mean, var, gain, beta, True, 0.3, 1e-3)
        dx, dw, db = torch.autograd.grad(y, (x, gain, beta), dy)
        return {"y": y.detach(), "dx": dx, "dw": dw, "db": db, "mean": mean, "var": var}

    def spoiled(self, like):
        return torch.full_like(like, float("nan"))

    def run(self, relu=False, affine=True, running=True, dy=None):
        """Both passes: results by name."""
        gain, beta = (self.gain, self.beta) if affine else (None, None)
        mean, var, batches = (held.clone() if running else None for held in (self.mean, self.var, self.batches))
        y, dx = self.spoiled(self.x), self.spoiled(self.x)
        vectors = gain, beta, mean, var, batches
        spec = spec_of(self.x, vectors, self.target)
        memory = batch_norm_forward(spec, self.x, vectors, self.count, y, 0.3, 1e-3, relu)
        dw, db = (self.spoiled(gain), self.spoiled(beta)) if affine else (None, None)
        dy = self.dy if dy is None else dy
        batch_norm_backward(spec, self.x, dy, gain, beta, self.count, memory, (dx, dw, db), relu)
        found = {"y": y, "dx": dx, "dw": dw, "db": db, "batches": batches}
        return found | ({"mean": mean, "var": var} if running else {})

    def check(self, found):
        for name in ("y", "dx", "dw", "db", "mean", "var"):
            got, want = found[name], self.want[name]
            if name in ("y", "dx"):
                assert (got[self.n :] == 0).all(), "rows that are not there"
                got = got[: self.n]
            if name == "dx" and self.n == 2:  # next to nothing is left of what is subtracted
                steep = self.want["y"].abs().max() / self.x[: self.n].cpu().double().std(0).min()
                assert (got.cpu() - want).abs().max() < 1e-3 * steep
            else:
                assert_close(got, want, got.dtype, name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_backward(kernel_lane, case):
    layer = Layer(kernel_lane, *case)
    found = layer.run()
    layer.check(found)
    assert found["batches"].item() == 8


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_behind_the_count_are_not_read(kernel_lane, case):
    layer = Layer(kernel_lane, *case, spare=300)
    assert layer.x.isnan().any() and layer.dy.isnan().any()
    layer.check(layer.run())


@pytest.mark.parametrize("shifts", [(0, 1), (1, 0), (1, 1)])
def test_odd_addresses(kernel_lane, shifts):
    """Steps are shorter there, so that the passes may have different parts."""
    layer = Layer(kernel_lane, 1100, 32, torch.float16)
    layer.x, layer.dy = (shifted(t, by) for t, by in zip((layer.x, layer.dy), shifts, strict=True))
    assert (layer.x.data_ptr() % 16, layer.dy.data_ptr() % 16) == tuple(2 * by for by in shifts)
    layer.check(layer.run())


@pytest.mark.parametrize("n", [0, 1])
def test_too_few_rows_for_a_variance(kernel_lane, n):
    layer = Layer(kernel_lane, 2, 5, torch.float32, spare=4)
    layer.count.fill_(n - 1)
    layer.x[n:], layer.dy[n:] = float("nan"), float("nan")
    found = layer.run()
    want = torch.zeros_like(layer.x)
    want[:n] = layer.beta
    assert torch.equal(found["y"], want) and (found["dx"] == 0).all()
    assert torch.equal(found["db"], layer.dy[:n].sum(0)) and (found["dw"] == 0).all()
    assert torch.equal(found["mean"], layer.mean) and torch.equal(found["var"], layer.var)
    assert found["batches"] == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_relu_is_exact(kernel_lane, dtype):
    """As a ReLU behind the rounded result, and the gradient cut off where that is not positive."""
    layer = Layer(kernel_lane, 300, 17, dtype)
    layer.beta[:9] = 0
    layer.gain[:5] *= 1e-8  # much of this becomes 0 in fp16
    plain, cut = layer.run(), layer.run(relu=True)
    assert torch.equal(cut["y"], plain["y"].relu())
    again = layer.run(dy=torch.where(plain["y"] > 0, layer.dy, 0))
    for name in ("dx", "dw", "db"):
        assert torch.equal(cut[name], again[name])
    if dtype == torch.float16:
        assert (plain["y"] == 0).sum() > 100


def test_a_large_offset_leaves_the_variance(kernel_lane):
    """The difference of squares would be all rounding."""
    layer = Layer(kernel_lane, 700, 20, torch.float32, offset=30_000.0)
    found = layer.run()
    torch.testing.assert_close(found["var"].cpu().double(), layer.want["var"], rtol=1e-4, atol=0)
    torch.testing.assert_close(found["mean"].cpu().double(), layer.want["mean"], rtol=1e-6, atol=0)
    assert (found["y"].cpu() - layer.want["y"]).abs().max() < 0.02


@pytest.mark.parametrize("vectors", [torch.float32, torch.float16])
def test_what_may_be_missing(kernel_lane, vectors):
    layer = Layer(kernel_lane, 90, 16, torch.float16, vectors=vectors)
    whole = layer.run()
    assert whole["mean"].dtype == whole["dw"].dtype == vectors
    layer.check(whole)
    assert torch.equal(layer.run(running=False)["y"], whole["y"])
    layer.gain.fill_(1)
    layer.beta.zero_()
    for name in ("y", "dx"):
        assert torch.equal(layer.run(affine=False)[name], layer.run()[name])


def test_the_same_bits_again(kernel_lane):
    layer = Layer(kernel_lane, 1000, 24, torch.float32)
    first, second = layer.run(relu=True), layer.run(relu=True)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_values_that_are_no_numbers_stay_in_their_channel(kernel_lane):
    layer = Layer(kernel_lane, 50, 4, torch.float32)
    clean = layer.run(relu=True)
    layer.x[3, 2] = float("nan")
    found = layer.run(relu=True)
    for name in ("y", "dx"):
        assert found[name][:, 2].isnan().all()
        assert torch.equal(found[name][:, [0, 1, 3]], clean[name][:, [0, 1, 3]])


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("channels", [16, 33])
def test_more_than_two_to_the_31_values(channels):
    n = (1 << 31) // channels + 5000
    x = torch.empty((n, channels), dtype=torch.float16, device="cuda").normal_(3, 2)
    from sparse_bridge.core.ops.batch_norm import batch_norm

    leaf, dy = x.requires_grad_(), torch.empty_like(x).normal_()
    y = batch_norm(leaf, (None,) * 5, momentum=0.1, eps=1e-5, relu=True)
    y.backward(dy)
    mean, total = (torch.zeros(channels, dtype=torch.float64, device="cuda") for _ in range(2))
    with torch.no_grad():
        for part in x.split(1 << 24):
            mean += part.double().sum(0) / n
        for part in x.split(1 << 24):
            total += (part.double() - mean).square().sum(0)
        scale = (total / n + 1e-5).rsqrt()
        cut, product = torch.zeros_like(mean), torch.zeros_like(mean)
        for rows, part in zip(x.split(1 << 24), dy.split(1 << 24), strict=True):
            xhat = (rows.double() - mean) * scale
            part = torch.where(xhat.half() > 0, part.double(), 0)
            cut, product = cut + part.sum(0) / n, product + (part * xhat).sum(0) / n
        for rows in (slice(0, 1000), slice(n - 1000, n)):
            xhat = (x[rows].double() - mean) * scale
            assert_close(y[rows], xhat.relu(), torch.float16, "y")
            part = torch.where(xhat.half() > 0, dy[rows].double(), 0)
            assert_close(leaf.grad[rows], (part - cut - xhat * product) * scale, torch.float16)
