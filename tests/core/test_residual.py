"""Features added in a convolution's store: given with the call, or when somebody adds them."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sparse_bridge.core.conv import fused_call
from sparse_bridge.core.conv.convolution import conv
from sparse_bridge.core.conv.deferred import Deferred
from sparse_bridge.core.conv.epilogue import Norm
from sparse_bridge.core.device import trace
from sparse_bridge.errors import DataTypeError, DeviceError, ShapeError, UnsupportedError
from tests.checks import assert_close
from tests.clouds import cloud, features
from tests.core.layers import layer, leaves, tensors

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]

EPS = 1e-3
KINDS = ("submanifold", "strided", "generative", "inverse")


class Case:
    """A layer with a norm and features like its result."""

    def __init__(self, lane, kind="submanifold", dtype=torch.float32, coords=None):
        self.made = layer(kind, 2, coords=coords, dense=coords is None, device=lane.device)
        self.kmap = self.made.kmap
        x, weight, bias, _ = tensors(self.made, 6, 10, dtype=dtype)
        n_out = len(self.made.truth(x, weight))
        rows = features(n_out, 10, 9, dtype)
        mean, var = features(10, 1, 5)[:, 0], features(10, 1, 6)[:, 0].square() + 0.5
        self.bare = self.made.truth(x, weight, bias)
        self.want = (self.bare - mean.double()) / (var.double() + EPS).sqrt()
        self.sum = self.want + rows.double()
        self.lane, self.dtype = lane, dtype
        self.x, self.weight, self.bias = (t.to(lane.device) for t in (x, weight, bias))
        self.rows = rows.to(lane.device)
        self.norm = Norm(mean.to(lane.device), var.to(lane.device), None, None, EPS)

    def __call__(self, **options):
        with self.lane.serving(self.dtype):
            return conv(self.x, self.weight, self.bias, self.kmap, **options)

    def deferred(self, activation="relu"):
        """The result that waits, and a list of the sums it has told of."""
        told = []
        pending = fused_call.Pending(self.norm, activation, 0.1, told.append)
        out, taken = fused_call.offer(pending, self)
        assert out is taken and type(out) is Deferred
        assert out.shape == self.want.shape and out.dtype == self.x.dtype
        assert out.device == self.x.device and out.stride() == (10, 1)
        return out, told

    def close(self, y, want):
        assert type(y) is torch.Tensor
        assert_close(y, want, self.dtype)


@pytest.fixture
def case(lane):
    return Case(lane)


@pytest.mark.parametrize(
    "kind, dtype",
    [*((kind, torch.float32) for kind in KINDS), ("strided", torch.float16), ("submanifold", torch.float64)],
)
def test_behind_the_norm_and_before_the_activation(lane, kind, dtype):
    case = Case(lane, kind, dtype)
    gap = torch.cat([case.rows, case.rows], 1)[:, ::2]
    for _ in range(2):  # the second call finds what the first resolved
        case.close(case(residual=case.rows), case.bare + case.rows.cpu().double())
        y = case(norm=case.norm, residual=case.rows, activation="relu")
        case.close(y, case.sum.relu())
        y = case(norm=case.norm, residual=case.rows, activation="leaky_relu", alpha=0.1)
        case.close(y, F.leaky_relu(case.sum, 0.1))
        case.close(case(residual=gap), case.bare + gap.cpu().double())
        case.close(case(), case.bare)


@pytest.mark.parametrize("kind", ["submanifold", "strided"])
def test_repeated_coordinates(lane, kind):
    """Where they are summed, results do not wait."""
    coords = cloud((9, 10), 2, 0.35)
    case = Case(lane, kind, coords=torch.cat([coords, coords[:5]]))
    y = case(norm=case.norm, residual=case.rows, activation="relu")
    case.close(y, case.sum.relu())
    if kind == "submanifold":
        out, _ = case.deferred()
        case.close(out + case.rows, case.sum.relu())
        return
    told = []
    pending = fused_call.Pending(case.norm, "relu", 0.0, told.append)
    out, taken = fused_call.offer(pending, case)
    assert out is taken and not told
    case.close(out, case.want)  # the activation belongs behind the sum


def test_no_rows(lane):
    case = Case(lane, coords=torch.empty((0, 3), dtype=torch.int32))
    assert case(residual=case.rows).shape == (0, 10)
    out, told = case.deferred()
    assert (out + case.rows).shape == (0, 10) and len(told) == 1


WRONG = {
    "rows": (lambda r: r[:-1], ShapeError, r"residual has shape \[\d+, 10\]; expected"),
    "channels": (lambda r: r[:, :9], ShapeError, r"residual has shape \[\d+, 9\]; expected"),
    "axes": (lambda r: r[0], ShapeError, "residual has shape"),
    "dtype": (lambda r: r.double(), DataTypeError, "residual is torch.float64, the result"),
    "device": (lambda r: r.to("meta"), DeviceError, "residual is on meta"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_residuals(lane, case, name):
    change, error, match = WRONG[name]
    for _ in range(2):
        with pytest.raises(error, match=match):
            case(residual=change(case.rows))
        case(residual=case.rows)
    twice = Case(lane, coords=torch.cat([case.made.x_coords, case.made.x_coords[:3]]).cpu())
    with pytest.raises(error, match=match):
        twice(residual=change(twice.rows))


def test_no_gradients(lane, case):
    for held in leaves([case.x, case.weight, case.rows], lane.device):
        given = {held.shape: held}
        x, weight, rows = (given.get(t.shape, t) for t in (case.x, case.weight, case.rows))
        with pytest.raises(UnsupportedError, match="fused residual has no gradient"):
            conv(x, weight, case.bias, case.kmap, residual=rows)


def test_autocast(lane, case):
    with lane.serving(torch.bfloat16):
        with torch.autocast(lane.device, torch.bfloat16):
            y = case(residual=case.rows)
        assert y.dtype == torch.bfloat16
        assert_close(y, case.bare + case.rows.cpu().double(), torch.bfloat16)
        with torch.autocast(lane.device, torch.bfloat16):
            told = []
            pending = fused_call.Pending(case.norm, None, 0.0, told.append)
            out, _ = fused_call.offer(pending, case)
        assert out.dtype == torch.bfloat16
        assert_close(out + case.rows.bfloat16(), case.sum, torch.bfloat16)
        assert len(told) == 1


SUMS = {
    "left": lambda out, rows: out + rows,
    "right": lambda out, rows: rows + out,
    "torch.add": torch.add,
    "method": lambda out, rows: rows.add(out),
    "in place": lambda out, rows: out.__iadd__(rows),
    "in place by name": lambda out, rows: out.add_(rows),
}


@pytest.mark.parametrize(
    "mode, name",
    [
        *((torch.no_grad, name) for name in SUMS),
        (torch.inference_mode, "left"),
        (torch.inference_mode, "torch.add"),
        (torch.enable_grad, "right"),
    ],
)
def test_sums_are_one_launch(case, name, mode):
    with mode(), trace.record() as events:
        out, told = case.deferred()
        assert not events
        y = SUMS[name](out, case.rows)
    assert [event.kind for event in events] == ["conv"] and told[0] is y and len(told) == 1
    case.close(y, case.sum.relu())


OTHERS = {
    "relu": (torch.relu, lambda w: w.relu()),
    "method": (lambda out: out.mul(2), lambda w: 2 * w),
    "concatenation": (lambda out: torch.cat([out, out], 1), lambda w: torch.cat([w, w], 1)),
    "rows": (lambda out: out[3:7], lambda w: w[3:7]),
    "copy": (lambda out: torch.empty_like(out).copy_(out), lambda w: w),
    "linear": (lambda out: F.linear(out, torch.eye(10).to(out)), lambda w: w),
    "keyword": (lambda out: torch.sub(1, other=out), lambda w: 1 - w),
    "in place": (lambda out: out.mul_(2), lambda w: 2 * w),
    "weighted sum": (lambda out: torch.add(out, 1, alpha=2), lambda w: w + 2),
    "a number": (lambda out: out + 1, lambda w: w + 1),
    "of a number": (lambda out: 1 + out, lambda w: w + 1),
    "one row": (lambda out: out + torch.ones(10).to(out), lambda w: w + 1),
    "wider": (lambda out: (out + torch.ones(out.shape).to(out.device).double()).float(), lambda w: w + 1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_everything_else_sees_the_result(case, name):
    made, want = OTHERS[name]
    out, told = case.deferred()
    y = made(out)
    assert not told
    assert_close(y, want(case.want))
    again = 2 * case.want if name == "in place" else case.want
    case.close(out + case.rows, again + case.rows.cpu().double())  # too late for one launch
    assert not told


def test_who_holds_both_sees_both(case):
    out, told = case.deferred()
    held = out
    case.close(out + case.rows, case.sum.relu())
    case.close(held.mul(1), case.want)
    held += case.rows
    assert len(told) == 1
    out, told = case.deferred(activation=None)
    held = out
    out += case.rows
    case.close(held.mul(1), case.sum)
    case.close(out, case.sum)


def test_two_that_wait(case):
    (one, told), (other, later) = case.deferred(), case.deferred()
    with trace.record() as events:
        case.close(one + other, (2 * case.want).relu())
    assert len(events) == 2 and len(told) == 1 and not later
    out, told = case.deferred()
    case.close(out + out, 2 * case.want)
    assert not told
    plain = case.rows.clone()
    plain += case.deferred()[0]
    case.close(plain, case.sum)


def test_gradients_go_the_long_way(lane, case):
    (held,) = leaves([case.rows], lane.device)
    out, told = case.deferred()
    y = out + held
    y.sum().backward()
    assert not told and torch.equal(held.grad, torch.ones_like(held))
    assert_close(y, case.sum)


def test_as_input_of_a_layer(lane, case):
    """By its address, as kernels take it."""
    square = layer("submanifold", 2, device=lane.device)
    weight = features(9 * 10, 4, 3).view(9, 10, 4) / 10
    out, told = case.deferred()
    y = conv(out, weight.to(lane.device), None, square.kmap)
    assert_close(y, square.truth(case.want, weight.double()))
    assert out.data_ptr() == out.result().data_ptr() != 0 and not told


MEMORY = {
    "numpy": lambda out: torch.from_numpy(out.cpu().numpy()),
    "asarray": lambda out: torch.from_numpy(np.asarray(out.cpu())),
    "list": lambda out: torch.tensor(out.tolist()),
    "copy": copy.deepcopy,
    "pickle": lambda out: pickle.loads(pickle.dumps(out)),
    "dlpack": torch.from_dlpack,
    "no copy": lambda out: out.contiguous().to(out.dtype).detach(),
}


@pytest.mark.parametrize("name", MEMORY)
def test_memory_is_that_of_the_result(case, name):
    out, told = case.deferred()
    y = MEMORY[name](out)
    case.close(y, case.want)
    assert out.data_ptr() == out.untyped_storage().data_ptr() == out.result().data_ptr()
    assert not told


def test_extensions_that_ask_for_memory_get_an_exception(case):
    out, _ = case.deferred()
    with pytest.raises(RuntimeError, match="data pointer"):
        torch.Tensor.data_ptr(out)


def test_inputs_changed_before_the_sum(case):
    out, _ = case.deferred()
    case.x.add_(1)
    with pytest.raises(RuntimeError, match=r"changed in place.*restore"):
        out + case.rows
    out, told = case.deferred()
    bare = case.made.truth(*(t.cpu() for t in (case.x, case.weight, case.bias)))
    mean, var = (t.cpu().double() for t in case.norm[:2])
    case.close(out.mul(1), (bare - mean) / (var + EPS).sqrt())
    case.x.add_(1)  # nobody asks any more
    assert out.sum().isfinite() and not told


def test_errors_come_from_the_layer(case):
    case.weight = case.weight[:, :5]
    pending = fused_call.Pending(case.norm, None, 0.0, print)
    with pytest.raises(ShapeError, match="6 channels, the weight expects 5"):
        fused_call.offer(pending, case)
    case.x = case.x[:, 0]
    with pytest.raises(ShapeError, match=r"expected \[N, C\]"):
        fused_call.offer(pending, case)


@pytest.mark.gpu
def test_another_stream():
    """The layer's stream computes what was asked for there; the other one waits."""
    from tests.conftest import Lane

    case, side = Case(Lane("cuda", "masked")), torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        case.x.mul_(1)
        out, told = case.deferred()
    y = out + case.rows
    case.close(y, case.sum)
    assert not told
