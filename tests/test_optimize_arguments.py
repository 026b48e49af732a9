"""What `optimize()` refuses, and how a model is left then."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge import hooks
from sparse_bridge.errors import ModelError, SettingError


@pytest.mark.parametrize("graphs", ["off", "auto", 2])
def test_graphs_is_no_mode(graphs):
    """`graphs="off"` would be true, and turn on what it is to turn off."""
    model = nn.Linear(1, 1)
    with pytest.raises(SettingError, match=r"graphs is .*; expected True, False or None"):
        sparse_bridge.optimize(model, graphs=graphs)
    assert sparse_bridge.optimize(model, graphs=False) is model
    sparse_bridge.restore(model)


def test_a_forward_of_somebody_elses_is_refused():
    hooked, compiled = nn.Linear(1, 1), torch.compile(nn.Linear(1, 1), backend="eager")
    hooked.register_forward_hook(lambda *_: None)
    for model in (hooked, compiled):
        with pytest.raises(ModelError, match=r"call optimize\(\) before") as caught:
            sparse_bridge.optimize(model)
        assert isinstance(caught.value, ValueError)


def test_after_an_example_that_fails_another_one_is_taken():
    model = nn.Linear(2, 1)
    with pytest.raises(RuntimeError):
        sparse_bridge.optimize(model, torch.ones(1, 3), graphs=False)
    assert hooks.may_be_replayed(model)
    assert sparse_bridge.optimize(model, torch.ones(1, 2)) is model


class Swallowing(nn.Linear):
    def forward(self, x, scale=1.0, **options):
        return super().forward(x) * scale


@pytest.mark.parametrize("example", [(), (torch.ones(1, 2),)])
def test_a_misspelt_option_is_not_the_models(example):
    model = Swallowing(2, 1)
    with pytest.raises(SettingError, match=r"optimize\(\) has no option 'graph'.* Did you mean: 'graphs'"):
        sparse_bridge.optimize(model, *example, graph=True)
    assert sparse_bridge.restore(sparse_bridge.optimize(model, torch.ones(1, 2), scale=2.0, other=1)) is model


def test_keywords_that_the_model_does_not_name_are_refused():
    with pytest.raises(SettingError, match="has no option 'x'; expected graphs, or inputs of the model"):
        sparse_bridge.optimize(nn.Linear(2, 1), x=torch.ones(1, 2))
    assert sparse_bridge.optimize(nn.Linear(2, 1), input=torch.ones(1, 2))  # an example by name
