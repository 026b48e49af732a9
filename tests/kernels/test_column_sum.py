"""Sums over rows against fp64, into memory full of NaN, and the bias gradients made of them."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge.core.device.column_sums import column_sums
from sparse_bridge.kernels.ops import column_sum as kernels
from sparse_bridge.kernels.ops.column_sum import column_sum
from tests.checks import assert_close
from tests.clouds import features
from tests.kernels.calls import target_of

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]

NAN = float("nan")


def total(lane, x, dtype=torch.float32):
    y = torch.full((x.shape[1],), NAN).to(dtype).to(lane.device)
    made = column_sum(x.to(lane.device), y, target_of(lane))
    assert made is y
    return y


@pytest.mark.parametrize("channels", [1, 3, 16, 17, 32, 33, 48, 100])
def test_columns(kernel_lane, channels):
    for n in (1, 255, 256, 257, 1000):
        x = features(n, channels, seed=n)
        assert_close(total(kernel_lane, x), x.double().sum(0))


@pytest.mark.parametrize(
    "dtype, held",
    [
        (torch.float16, torch.float16),
        (torch.float16, torch.float32),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_dtypes(kernel_lane, dtype, held):
    if torch.bfloat16 in (dtype, held) and not target_of(kernel_lane).has_bf16:
        pytest.skip("no bf16 here")
    x = features(777, 24, dtype=dtype)
    y = total(kernel_lane, x, held)
    assert y.dtype == held
    assert_close(y, x.double().sum(0), held)


def test_more_parts_than_the_device_has_programs_for(kernel_lane, monkeypatch):
    """Several steps for each part, the last ones with no rows at all."""
    for programs in (1, 1000):
        monkeypatch.setattr(kernels, "PROGRAMS", programs)
        for n in (3000, 5001):
            x = features(n, 40, seed=n)
            assert_close(total(kernel_lane, x), x.double().sum(0))


def test_rows_that_start_anywhere(kernel_lane):
    """Memory that is not aligned, before and after some that is."""
    memory = features(1, 24 * 300 + 1)[0].half()
    for shift in (0, 1, 0):
        x = memory[shift : shift + 24 * 299].view(299, 24)
        held = memory.to(kernel_lane.device)[shift : shift + 24 * 299].view(299, 24)
        y = torch.full((25,), NAN).to(kernel_lane.device)[shift : shift + 24]
        assert_close(column_sum(held, y, target_of(kernel_lane)), x.double().sum(0))


def test_large_sums_do_not_round_away_small_ones(kernel_lane):
    x = torch.ones(20_000, 2).half()
    x[:, 1] = 0.25
    y = total(kernel_lane, x)
    assert y.tolist() == [20_000, 5_000]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_where_torch_does_it(kernel_lane, dtype):
    target = target_of(kernel_lane)
    empty = torch.empty((0, 5), dtype=dtype, device=kernel_lane.device)
    assert column_sums(empty, dtype, target).tolist() == [0] * 5
    x = features(70, 5, dtype=dtype).to(kernel_lane.device)
    for where in (None, target if dtype != torch.float64 else None):
        y = column_sums(x, dtype, where)
        assert y.dtype == dtype
        assert_close(y, x.cpu().double().sum(0), dtype)
    wide = column_sums(x, torch.float64, target)
    assert wide.dtype == torch.float64
    assert_close(wide, x.cpu().double().sum(0), torch.float32)


@pytest.mark.gpu
def test_more_than_2_31_values():
    from tests.conftest import Lane

    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GiB of free GPU memory")
    lane, rows = Lane("cuda", "masked"), (1 << 31) // 64 + 1000
    x = torch.zeros((rows, 64), dtype=torch.float16, device="cuda")
    x[-700:] = 1
    assert (total(lane, x) == 700).all()
