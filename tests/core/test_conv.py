"""Convolution and its gradients against dense torch (1-D to 3-D) and the reference (4-D)."""

import pytest
import torch

from sparse_bridge.core import functional
from tests.checks import assert_close
from tests.clouds import cloud
from tests.core.layers import KINDS, SHAPES, check, layer, leaves, tensors

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]


@pytest.mark.parametrize("dimension", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_and_dimension(any_lane, kind, dimension):
    check(layer(kind, dimension, device=any_lane.device, seed=dimension), 16, 32, any_lane)


@pytest.mark.parametrize(
    "kind, kernel, stride, padding, dilation, shape",
    [
        ("submanifold", (1, 3, 5), 1, None, 1, (4, 6, 8)),
        ("submanifold", (5, 5, 5), 1, None, 1, (7, 6, 6)),
        ("submanifold", (3, 3), 1, None, (2, 3), (11, 12)),
        ("strided", (1, 1, 1), 2, 0, 1, (6, 6, 6)),
        ("strided", (2, 2, 2), 2, 0, 1, (6, 7, 6)),
        ("strided", (3, 1, 2), (3, 1, 2), (2, 0, 1), (2, 1, 1), (7, 5, 6)),
        ("strided", (5, 3), (2, 3), (1, 2), (1, 2), (12, 11)),
        ("strided", (3, 3), 1, 0, 1, (8, 9)),
        ("generative", (2, 3, 1), (2, 1, 3), (0, 1, 0), (1, 2, 1), (4, 4, 3)),
        ("generative", (4,), (3,), (1,), (1,), (20,)),
        ("inverse", (2, 2, 2), 2, 0, 1, (6, 7, 6)),
        ("inverse", (3, 5), (2, 3), (1, 2), (2, 1), (12, 11)),
        ("between", (2, 3), (2, 1), (1, 0), (1, 2), (10, 12)),
    ],
    ids=str,
)
def test_kernel_shapes(lane, kind, kernel, stride, padding, dilation, shape):
    made = layer(kind, 0, kernel, stride, padding, dilation, shape, device=lane.device, seed=3)
    check(made, 16, 32, lane)


@pytest.mark.parametrize(
    "kind, kernel, padding, dilation",
    [
        ("submanifold", (3, 3, 3), None, 1),
        ("submanifold", (2, 2, 4), None, 1),
        ("submanifold", (2, 3, 4), (1, 2, 0), 1),
        ("submanifold", (1, 2, 9), (0, 0, 9), 1),
        ("submanifold", (3, 3, 3), None, (1, 1, 2)),
        ("strided", (2, 3, 4), (0, 1, 2), 1),
    ],
    ids=str,
)
def test_crowded_scenes(lane, kind, kernel, padding, dilation):
    """Most neighbours present, few channels: long runs of pairs, kernels without a middle."""
    made = layer(kind, 3, kernel, padding=padding, dilation=dilation, share=0.8, device=lane.device)
    check(made, 4, 16, lane)


def test_seven_cubed_kernel(lane):
    """343 offsets: eleven mask words."""
    made = layer("submanifold", 3, 7, shape=(6, 6, 6), share=0.15, device=lane.device)
    assert made.volume == 343
    check(made, 8, 8, lane)


@pytest.mark.parametrize("c_in, c_out", [(1, 1), (1, 33), (3, 5), (33, 3), (5, 16), (17, 64), (96, 130)])
def test_channel_counts(lane, c_in, c_out):
    check(layer("submanifold", 2, device=lane.device), c_in, c_out, lane)


@pytest.mark.parametrize("kind", ["submanifold", "strided", "inverse"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(any_lane, kind, dtype):
    check(layer(kind, 3, device=any_lane.device), 16, 32, any_lane, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_with_odd_channels(lane, dtype):
    check(layer("submanifold", 3, device=lane.device), 33, 5, lane, dtype=dtype)


def test_tf32_where_it_is_allowed(lane):
    made = layer("submanifold", 3, device=lane.device)
    check(made, 32, 32, lane, tolerance="tf32", allow_tf32=True)


def test_ieee_where_tf32_is_not_allowed(lane):
    """Products whose low bits TF32 would drop, with sums that cancel down to those bits."""
    made = layer("submanifold", 2, device=lane.device)
    x = torch.full((len(made.x_coords), 16), 1 + 2.0**-12)
    weight = torch.ones(9, 16, 16)
    y = functional.conv(x.to(lane.device), weight.to(lane.device), None, made.kmap)
    want = made.truth(x, weight)
    torch.testing.assert_close(y.cpu().double(), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("groups, c_in, c_out", [(2, 32, 64), (3, 9, 15), (4, 4, 8)])
@pytest.mark.parametrize("kind", ["submanifold", "inverse"])
def test_groups(lane, kind, groups, c_in, c_out):
    check(layer(kind, 2, device=lane.device), c_in, c_out, lane, groups=groups)


@pytest.mark.parametrize("n", [0, 1, 31, 63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("kind", ["submanifold", "strided"])
def test_row_counts_around_the_tile(lane, kind, n):
    coords = cloud((12, 13), 1, 1.0, seed=8)[:n].contiguous()
    made = layer(kind, shape=(12, 13), coords=coords, batch_size=1, device=lane.device)
    check(made, 16, 16, lane)


@pytest.mark.parametrize("kind", KINDS)
def test_empty_batch_items(lane, kind):
    made = layer(kind, 2, batch_size=4, empty_items=(0, 2), device=lane.device)
    assert set(made.x_coords[:, 0].tolist()) == {1, 3}
    check(made, 16, 16, lane)


@pytest.mark.parametrize("kind", KINDS)
def test_no_bias(lane, kind):
    check(layer(kind, 1, device=lane.device), 16, 16, lane, bias=False)


def test_weights_may_be_strided_views(lane):
    """[V, C_in, C_out] seen through a permuted and cropped parameter, which takes the gradient."""
    made = layer("submanifold", 2, device=lane.device)
    x, weight, _, dy = tensors(made, 16, 16)
    big = torch.randn(20, 9, 40)
    big[2:18, :, 5:21] = weight.permute(2, 0, 1)
    parameter = big.to(lane.device).requires_grad_()
    view = parameter[2:18, :, 5:21].permute(1, 2, 0)
    y = functional.conv(x.to(lane.device), view, None, made.kmap)
    y.backward(dy.to(lane.device))
    x64, weight64 = leaves([x.double(), weight.double()], "cpu")
    want = made.truth(x64, weight64)
    want.backward(dy.double())
    torch.testing.assert_close(y.cpu().double(), want, rtol=1e-4, atol=1e-4)
    gradient = parameter.grad.cpu().double()
    got = gradient[2:18, :, 5:21].permute(1, 2, 0)
    torch.testing.assert_close(got, weight64.grad, rtol=1e-4, atol=1e-3)
    gradient[2:18, :, 5:21] = 0
    assert not gradient.any()


def test_weights_may_be_expanded(lane):
    """One matrix for all offsets, by stride 0: its gradient is the sum over the offsets."""
    made = layer("submanifold", 2, device=lane.device)
    x, weight, _, dy = tensors(made, 16, 16)
    (shared,) = leaves([weight[:1]], lane.device)
    y = functional.conv(x.to(lane.device), shared.expand(9, 16, 16), None, made.kmap)
    y.backward(dy.to(lane.device))
    (exact,) = leaves([weight[:1].double()], "cpu")
    made.truth(x, exact.expand(9, 16, 16)).backward(dy.double())
    assert_close(shared.grad, exact.grad)


def test_weights_in_the_other_layout(lane):
    """[C_out, *kernel, C_in] gives what [V, C_in, C_out] gives, forward and backward."""
    made = layer("strided", 3, kernel=(2, 3, 1), device=lane.device)
    x, weight, bias, dy = tensors(made, 8, 24, groups=2)
    rows, leaf_weight, shift = leaves([x, weight, bias], lane.device)
    y = functional.conv(rows, leaf_weight, shift, made.kmap, groups=2)
    y.backward(dy.to(lane.device))
    other = weight.permute(2, 0, 1).reshape(24, 2, 3, 1, 4)
    rows2, taps2, shift2 = leaves([x, other, bias], lane.device)
    y2 = functional.conv(rows2, taps2, shift2, made.kmap, layout="ovi", groups=2)
    y2.backward(dy.to(lane.device))
    for a, b in ((y, y2), (rows.grad, rows2.grad), (shift.grad, shift2.grad)):
        torch.testing.assert_close(a, b)
    gradient = taps2.grad.reshape(24, 6, 4).permute(1, 2, 0)
    torch.testing.assert_close(leaf_weight.grad, gradient, rtol=1e-4, atol=1e-5)


def test_features_may_be_column_slices(lane):
    """Rows further apart than they are long, and columns that do not start at the first."""
    made = layer("submanifold", 2, device=lane.device)
    x, weight, bias, dy = tensors(made, 16, 16)
    wide = torch.randn(len(x), 40)
    wide[:, 3:19] = x
    wide = wide.to(lane.device).requires_grad_()
    rows, leaf_weight, shift = leaves([x, weight, bias], lane.device)
    y = functional.conv(wide[:, 3:19], leaf_weight, shift, made.kmap)
    want = functional.conv(rows, leaf_weight, shift, made.kmap)
    torch.testing.assert_close(y, want)
    y.backward(dy.to(lane.device).t().contiguous().t())  # a gradient stored column by column
    want.backward(dy.to(lane.device))
    torch.testing.assert_close(wide.grad[:, 3:19], rows.grad)
