"""Gradients and outputs of a graph beside those of the layers: what rounding explains, and what it does not."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge import tolerances
from sparse_bridge.core.capture.comparison import compare_within_rounding
from sparse_bridge.refusals import Refusal, Why

NAMES = ["the gradient of weight", "output 0"]


@pytest.fixture
def values():
    return [torch.randn(50, 4, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]


class Noisy:
    """What the layers compute of features that rounding moved by `share`; counts how often it is asked."""

    def __init__(self, values, share=0.0):
        self.values, self.share, self.asked = values, share, 0

    def __call__(self):
        self.asked += 1
        return [value * (1 + self.share) for value in self.values]


def moved(values, index, share):
    """`values`, of which one is off by `share` of its norm."""
    return [value * (1 + share) if number == index else value for number, value in enumerate(values)]


def test_equal_values_need_no_second_run(values):
    noisy = Noisy(values)
    compare_within_rounding(NAMES, [value.clone() for value in values], values, noisy, torch.float32)
    assert noisy.asked == 0


@pytest.mark.parametrize("index", [0, 1])
def test_what_is_off_is_measured_by_a_second_run(values, index):
    """Three times as far as rounding moves the layers' own results is allowed, and no more."""
    quantity = "step" if NAMES[index].startswith("output") else "gradients"
    share = 10 * tolerances.of(quantity, torch.float32).rms
    noisy = Noisy(values, share)
    compare_within_rounding(NAMES, moved(values, index, share), values, noisy, torch.float32)
    assert noisy.asked == 1
    with pytest.raises(Refusal) as error:
        compare_within_rounding(NAMES, moved(values, index, 6 * share), values, Noisy(values, share), torch.float32)
    assert error.value.why is Why.GRAPH_MIXED_GRADIENTS and NAMES[index] in str(error.value)


@pytest.mark.parametrize("broken", [None, torch.zeros(49, 4)])
def test_gradients_of_another_shape_are_refused(values, broken):
    with pytest.raises(Refusal) as error:
        compare_within_rounding(NAMES, [broken, values[1]], values, Noisy(values), torch.float32)
    assert error.value.why is Why.GRAPH_GRADIENT_SHAPE


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_values_that_are_not_finite(values, number):
    """NaN of a graph is a difference; where the layers have it themselves, nothing can be said."""
    bad = [values[0].clone(), values[1]]
    bad[0][7, 2] = number
    with pytest.raises(Refusal) as error:
        compare_within_rounding(NAMES, bad, values, Noisy(values), torch.float32)
    assert error.value.why is Why.GRAPH_MIXED_GRADIENTS
    with pytest.raises(Refusal) as error:
        compare_within_rounding(NAMES, values, bad, Noisy(bad), torch.float32)
    assert error.value.why is Why.GRAPH_INFINITE


def test_nothing_to_compare():
    compare_within_rounding(["the features"], [None], [None], Noisy([]), torch.float16)
    empty = torch.zeros(0, 3)
    compare_within_rounding(["output 0"], [empty], [empty], Noisy([]), torch.float16)
