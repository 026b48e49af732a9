"""Comparison of tensors: what passes, and above all what does not."""

from __future__ import annotations

import pytest
import torch

from compat.compare import Limits, assert_close, assert_finite, assert_gradients_close
from compat.subject import flatten

from ..adapters.spconv import apis

WANT = torch.linspace(-2, 2, 40).view(10, 4)


@pytest.mark.parametrize(
    ("got", "message"),
    [
        ([], "0 tensors, expected 1"),
        ([WANT[:9]], r"shape \[9, 4\], expected \[10, 4\]"),
        ([WANT * 1.1], r"output 0: RMS error 1.0e-01 \(limit 1e-03\)"),
        ([torch.full_like(WANT, float("nan"))], "RMS error nan"),
        ([WANT + torch.eye(10, 4) * 0.05 * (torch.arange(4) == 0)], "largest"),
    ],
)
def test_differences_are_seen(got, message):
    with pytest.raises(AssertionError, match=message):
        assert_close(got, [WANT], 1e-3, "output")


def test_rounding_passes_and_is_reported():
    assert 0 < assert_close([WANT * (1 + 1e-5)], [WANT.double()], 1e-3, "output") < 1e-4
    assert assert_close([], [], 1e-3, "output") == 0


def test_gradients_near_zero_count_relative_to_all():
    want = {"weight": WANT, "bias": torch.full((4,), 1e-9)}
    got = {"weight": WANT, "bias": torch.full((4,), -1e-9)}
    limits = Limits(1e-4, 1e-4, 1e-2)
    assert_gradients_close(got, want, limits)
    with pytest.raises(AssertionError, match="gradient of weight: RMS"):
        assert_gradients_close({**got, "weight": -WANT}, want, limits)
    tiny = {name: one * 1e-9 for name, one in want.items()}
    with pytest.raises(AssertionError, match="gradient of weight: RMS"):
        assert_gradients_close({**tiny, "weight": tiny["weight"] * 1.01}, tiny, limits)
    with pytest.raises(AssertionError, match="only one side has gradients of bias"):
        assert_gradients_close({"weight": WANT}, want, limits)


def test_finite_means_present_and_finite():
    assert_finite([WANT, torch.tensor([1])], "output")
    for wrong, message in (
        ([], "no tensors"),
        ([WANT[:0]], "all 1 tensors are empty"),
        ([WANT, WANT / 0], "output 1: 40 of 40"),
    ):
        with pytest.raises(AssertionError, match=message):
            assert_finite(wrong, "output")


def test_a_model_may_widen_its_limits():
    usual, wide = Limits.of("float32", {}), Limits.of("float32", {"float32": 1e-2})
    assert wide.output == 1e-2 > usual.output
    assert wide.gradient / usual.gradient == pytest.approx(1e-2 / usual.output)


def test_results_are_flattened_and_rows_of_sparse_tensors_sorted():
    coords = torch.tensor([[1, 0, 5], [0, 2, 2], [0, 2, 1]])
    with apis.standin() as sp:
        feats = torch.tensor([[1.0], [2.0], [3.0]])
        sparse = sp.SparseConvTensor(feats, coords.int(), [3, 6], 2)
        found = list(flatten({"b": (sparse, None), "a": [WANT, 3, "text"]}))
    assert torch.equal(found[0], WANT)
    assert found[1].flatten().tolist() == [3.0, 2.0, 1.0] and len(found) == 2
    with pytest.raises(TypeError, match="got a object among the results"):
        list(flatten([object()]))
