"""Models whose graphs are replayed, in compiled programs: the layers are in the graph as those of
the unchanged model."""

from __future__ import annotations

import pytest
import torch

import sparse_bridge
from sparse_bridge import policy, settings
from sparse_bridge.core.capture import graph_regions
from sparse_bridge.core.maps import request
from sparse_bridge.core.prefetch import prefetch
from tests.compile.comparison import assert_same
from tests.compile.programs import APIS, PROGRAMS, scene
from tests.compile.test_fusion import fused
from tests.fake_gpu import HOPPER
from tests.releases import WHOLE_GRAPHS

pytestmark = WHOLE_GRAPHS


@pytest.mark.sample(1)
@pytest.mark.parametrize("api", APIS)
def test_optimized_with_graphs(api):
    with PROGRAMS[api]() as programs, torch.no_grad():
        program = programs["three"]().eval()
        expected = program(*scene(0))
        sparse_bridge.optimize(program, graphs=True)
        names = fused(program, *scene(0))
        assert names["conv_fused"] == 3 and not names["conv"], names
        assert_same(program(*scene(0)), expected)


@pytest.mark.sample(1)
@pytest.mark.parametrize("choice", ("off", "graphs"))
@pytest.mark.parametrize("api", ("spconv", "torchsparse", "minkowski"))
@pytest.mark.usefixtures("own_provider")
def test_settings(api, choice, rules):
    """With `graphs` a part of a model that ran before has a forward that replays it."""
    rules.set(policy, LEAST_LAYERS=1)
    rules.set(graph_regions, kernel_target=lambda device: HOPPER)  # on a CPU nothing is captured
    request.register(graph_regions._provide, prefetch.announced)  # whatever ran before
    with settings.override(optimize=choice), PROGRAMS[api]() as programs, torch.no_grad():
        program = programs["three"]().eval()
        expected = program(*scene(0))
        assert len(graph_regions.summary()) == (choice == "graphs")
        assert fused(program, *scene(0))["conv_fused"] == 3
        assert_same(program(*scene(0)), expected)
        graph_regions.remove()
