"""Bad input of layers: one typed error each, saying what was got and what was expected."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparse_bridge.core import functional
from sparse_bridge.core.geometry.weights import layout_of
from sparse_bridge.errors import (
    DataTypeError,
    DeviceError,
    GeometryError,
    OverflowLimitError,
    ShapeError,
    SparseBridgeError,
    TensorExpectedError,
    UnsupportedError,
)
from tests.checks import assert_error
from tests.clouds import cloud

SHAPE, N = (9, 10), 50
COORDS = cloud(SHAPE, 2, 0.4)[:N]
OFFSETS = functional.kernel_offsets((3, 3))
CMAP = functional.coordinate_map(COORDS, SHAPE, 2)
KMAP = functional.submanifold(CMAP, OFFSETS)
X, WEIGHT, BIAS = torch.randn(N, 4), torch.randn(9, 4, 8), torch.randn(8)
BATCH = COORDS[:, 0].contiguous()


def conv(x=X, weight=WEIGHT, bias=BIAS, kmap=KMAP, **options):
    return functional.conv(x, weight, bias, kmap, **options)


def pool(x, mode="max"):
    return functional.pool(x, KMAP, mode)


def global_pool(x=X, batch=BATCH, batch_size=2, mode="max"):
    return functional.global_pool(x, batch, batch_size, mode)


CASES = {
    "features of rank 1": (ShapeError, ["[4]", "[N, C]"], lambda: conv(X[0])),
    "features of rank 3": (ShapeError, ["[1, 50, 4]", "[N, C]"], lambda: conv(X[None])),
    "too few rows": (ShapeError, ["49 rows", "50"], lambda: conv(X[1:])),
    "channel count": (ShapeError, ["3 channels", "expects 4"], lambda: conv(X[:, :3])),
    "channels of groups": (ShapeError, ["4 channels", "8", "2 group"], lambda: conv(groups=2)),
    "groups that do not divide": (ShapeError, ["8 output", "3 groups"], lambda: conv(groups=3)),
    "no groups": (ShapeError, ["0", "at least 1"], lambda: conv(groups=0)),
    "weights of fewer offsets": (ShapeError, ["8 matrices", "9 offsets"], lambda: conv(weight=WEIGHT[1:])),
    "weight of rank 4": (ShapeError, ["[1, 9, 4, 8]", "[V, C_in, C_out]"], lambda: conv(weight=WEIGHT[None])),
    "weight of rank 1": (ShapeError, ["[8]", "[C_out, *kernel, C_in]"], lambda: conv(weight=BIAS, layout="ovi")),
    "weight without channels": (ShapeError, ["[9, 0, 8]", "at least one"], lambda: conv(X[:, :0], WEIGHT[:, :0])),
    "weight layout": (ShapeError, ["'oiv'", "vio", "ovi"], lambda: conv(layout="oiv")),
    "weight of 2^31 elements": (
        OverflowLimitError,
        [str(1 << 31), "2^31"],
        lambda: layout_of(torch.empty(32, 1 << 13, 1 << 13, device="meta"), "vio"),
    ),
    "bias": (ShapeError, ["[7]", "[8]"], lambda: conv(bias=BIAS[1:])),
    "integer features": (DataTypeError, ["torch.int32", "fp16"], lambda: conv(X.int(), WEIGHT.int())),
    "complex features": (DataTypeError, ["torch.complex64", "fp16"], lambda: conv(X.cfloat(), WEIGHT.cfloat())),
    "features and weight of two dtypes": (
        DataTypeError,
        ["torch.float16", "torch.float32", "autocast"],
        lambda: conv(X.half()),
    ),
    "no features": (TensorExpectedError, ["torch.Tensor expected for x", "NoneType"], lambda: conv(None)),
    "no map": (DataTypeError, ["NoneType", "KernelMap"], lambda: conv(kmap=None)),
    "both results for a map": (
        DataTypeError,
        ["kmap is tuple", "(coordinates, map); pass the second"],
        lambda: conv(kmap=functional.strided(CMAP, OFFSETS, 2)),
    ),
    "a module for a norm": (DataTypeError, ["norm is BatchNorm1d", "Norm(mean"], lambda: conv(norm=nn.BatchNorm1d(8))),
    "a pool along coordinates": (
        DataTypeError,
        ["kmap is CoordinateMap", "a KernelMap"],
        lambda: functional.pool(X, CMAP, "max"),
    ),
    "weight elsewhere": (DeviceError, ["cpu", "meta"], lambda: conv(weight=WEIGHT.to("meta"))),
    "activation": (UnsupportedError, ["'gelu'", "relu"], lambda: conv(activation="gelu")),
    "pool mode": (UnsupportedError, ["'min'", "max, avg, sum"], lambda: pool(X, "min")),
    "pooled rows": (ShapeError, ["[49, 4]", "50 rows"], lambda: pool(X[1:])),
    "pooled integers": (DataTypeError, ["torch.int32", "fp16"], lambda: pool(X.int())),
    "pooled fp8": (DataTypeError, ["float8_e4m3fn", "fp16"], lambda: pool(X.to(torch.float8_e4m3fn))),
    "pooled elsewhere": (DeviceError, ["meta", "cpu"], lambda: pool(X.to("meta"))),
    "global pool mode": (UnsupportedError, ["'min'", "max, avg, sum"], lambda: global_pool(mode="min")),
    "global pool rows": (ShapeError, ["[49, 4]", "[50]"], lambda: global_pool(X[1:])),
    "global pool of integers": (DataTypeError, ["torch.int32", "fp16"], lambda: global_pool(X.int())),
    "batch indices of fp32": (DataTypeError, ["torch.float32", "int64"], lambda: global_pool(batch=BATCH.float())),
    "batch indices elsewhere": (DeviceError, ["cpu", "meta"], lambda: global_pool(batch=BATCH.to("meta"))),
    "negative batch size": (GeometryError, ["-1", "0 or more"], lambda: global_pool(batch_size=-1)),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name):
    error, words, call = CASES[name]
    assert_error(call, error, words)


def test_good_input_passes():
    """The defaults above are sound: each case fails for its own reason only."""
    assert conv().shape == (N, 8)
    assert pool(X).shape == (N, 4) and global_pool().shape == (2, 4)


def test_a_failed_call_leaves_the_map_usable():
    want = conv()
    for _, _, call in CASES.values():
        with pytest.raises(SparseBridgeError):
            call()
    assert torch.equal(conv(), want)


@pytest.mark.parametrize("what", ["features", "all", "bias"])
def test_tensors_without_values(what):
    there = {"features": (X,), "all": (X, WEIGHT), "bias": (BIAS,)}[what]
    operands = [t.to("meta") if any(t is one for one in there) else t for t in (X, WEIGHT, BIAS)]
    assert_error(lambda: conv(*operands), DeviceError, ["cpu", "meta"])


def test_bias_of_integers():
    assert_error(lambda: conv(bias=BIAS.int()), DataTypeError, ["torch.int32"])


@pytest.mark.gpu
def test_two_devices():
    there = functional.coordinate_map(COORDS.cuda(), SHAPE, 2)
    assert_error(lambda: functional.between(CMAP, there, OFFSETS), DeviceError, ["cpu and cuda:0", "one device"])
    assert_error(lambda: conv(X.cuda(), WEIGHT.cuda(), None), DeviceError, ["cuda:0", "cpu"])
    same = functional.submanifold(there, OFFSETS)
    assert_error(lambda: functional.pool(X, same, "max"), DeviceError, ["cuda:0", "cpu"])
