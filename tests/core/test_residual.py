"""Features added in a convolution's store: given with the call, or when somebody adds them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sparse_bridge.core.conv.convolution import conv
from sparse_bridge.core.conv.epilogue import Norm
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


def test_no_rows(lane):
    case = Case(lane, coords=torch.empty((0, 3), dtype=torch.int32))
    assert case(residual=case.rows).shape == (0, 10)


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
