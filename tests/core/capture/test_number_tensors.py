"""Models that make tensors of Python numbers behind their first sparse layer."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
import torch

from sparse_bridge.core.capture import graph_regions
from sparse_bridge.core.capture.calls import frames, number_tensors
from sparse_bridge.refusals import Refusal, Why

from . import apis
from .graph_sizes import graphs_of
from .test_replay_apis import optimized, replayer_of

pytestmark = pytest.mark.emulated


class Around(torch.nn.Module):
    """A network, and a function of its features and coordinates."""

    def __init__(self, network, function):
        super().__init__()
        self.network, self.function = network, function
        self.numbers = [0.5, 2.0, 3.0, 4.0]

    def forward(self, x):
        found = self.network(x)
        return {**found, "made": self.function(self, found["out"].features, found["out"].indices)}


def scaled(model, features, coords):
    return features * torch.tensor(model.numbers, device=features.device)


def scaled_as(model, features, coords):
    return features * torch.as_tensor(np.array(model.numbers, np.float32), device=features.device)


def scaled_new(model, features, coords):
    return features * features.new_tensor(model.numbers, dtype=torch.float64).float() + features.new_tensor(1)


def changed_in_place(model, features, coords):
    scale = torch.tensor(model.numbers, device=features.device)
    scale += 1.0
    return features * scale


def centres(model, features, coords):
    return coords[:, [3, 2, 1]].float() * coords.new_tensor([1, 2, 3]) + features[:, [0, 0, 2]]


PROGRAMS = [scaled, scaled_as, scaled_new, changed_in_place, centres]


def values(found):
    return [found[key].features for key in ("out", "deep")] + [found["made"]]


def calls(model, plain, module, device, trains, seeds):
    for seed in seeds:
        given = lambda seed=seed: apis.scene(module, "spconv", seed, device, 0.25)  # noqa: E731
        apis.both(model, plain, given, trains, values, rtol=0 if not trains else 1e-3, atol=0 if not trains else 1e-4)


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_model_with_such_tensors_is_replayed(device, rules, program, trains):
    rules.hold(graphs_of(512, watched=True))
    with apis.standin("spconv") as module:
        model, plain = optimized(module, "spconv", device, trains, lambda network: Around(network, program))
        calls(model, plain, module, device, trains, range(7))
        assert replayer_of(model).hits >= 2
        # Other numbers are another program.
        if program is not centres:
            for one in (model, plain):
                one.numbers = [3.0, 1.0, 2.0, 0.25]
            hits = replayer_of(model).hits
            calls(model, plain, module, device, trains, range(7, 15))
            assert replayer_of(model).hits >= hits + 2


def test_numbers_that_follow_rows_are_refused(device, rules):
    rules.hold(graphs_of(512))
    mean = lambda model, features, coords: features / torch.tensor([len(features)], device=features.device)  # noqa: E731
    with apis.standin("spconv") as module:
        model, plain = optimized(module, "spconv", device, False, lambda network: Around(network, mean))
        calls(model, plain, module, device, False, range(7))
        (one,) = graph_regions.summary()
        assert not one.hits and Why.GRAPH_OTHER_BITS.name in one.reason


def test_what_a_program_keeps_is_its_own(device, rules):
    """Numbers on another device, and what stays for longer than a call, are torch's."""
    rules.hold(graphs_of(512))

    def on_the_host(model, features, coords):
        return features * torch.tensor(model.numbers, device="meta").shape[0]

    with apis.standin("spconv") as module:
        model, plain = optimized(module, "spconv", device, False, lambda network: Around(network, on_the_host))
        calls(model, plain, module, device, False, range(7))
        assert replayer_of(model).hits >= 2


def test_other_threads_have_torchs_functions(device):
    numbers, seen, there = number_tensors.NumberTensors(), [], threading.Event()
    device = torch.device(device)

    def look():
        seen.append(torch.tensor([1.0, 2.0], device=device))
        seen.append(torch.arange(4.0, device=device)[[2, 0]])
        there.set()

    with numbers.served(device, True):
        mine = torch.tensor([1.0, 2.0], device=device)
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        again = torch.tensor([1.0, 2.0], device=device)
        assert len(numbers._sent) == 1  # for this thread's two
    assert there.is_set()
    assert seen[0].tolist() == mine.tolist() == again.tolist() and seen[1].tolist() == [2.0, 0.0]
    assert mine.data_ptr() != again.data_ptr()


def test_tensors_in_lists(device):
    """They are none of the numbers; a method of Python in the place of `Tensor.__getitem__` would break them."""
    device = torch.device(device)
    one = torch.ones((), device=device)
    with number_tensors.NumberTensors().served(device, True):
        assert torch.tensor([one, one]).tolist() == torch.as_tensor([one, 1]).tolist() == [1, 1]
    assert torch.tensor([one, one]).tolist() == [1, 1]


def test_a_device_by_its_number(device):
    """0 is the first GPU, and not the default device."""

    def first():
        try:
            return torch.tensor([1.0], device=0).device
        except (RuntimeError, AssertionError) as error:
            return str(error)

    expected = first()
    with number_tensors.NumberTensors().served(torch.device(device), True):
        assert first() == expected


def test_arrays_in_local_variables(device):
    """Those of plain classes are read by value; others may hold more than that."""

    def alive(value):
        def innermost():
            return frames.constants_alive(sys._getframe(), outermost.__code__, (), 5)

        def between(value):
            return innermost(), value

        def outermost():
            return between(value)

        return outermost()[0]

    assert alive(np.array([1.0])) == alive(np.array([1.0])) != alive(np.array([2.0]))
    assert alive(np.array(1.0, np.float32)) != alive(np.float32(1.0))
    for value in (np.ma.masked_array([1.0, 2.0], [True, False]), np.array(["text"])):
        with pytest.raises(Refusal, match=Why.GRAPH_LOCAL.name):
            alive(value)
