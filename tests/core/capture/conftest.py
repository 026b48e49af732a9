from __future__ import annotations

import pytest

from sparse_bridge import policy, settings
from sparse_bridge.core.capture import graph_regions, model_graphs
from sparse_bridge.core.maps import request
from sparse_bridge.core.prefetch import prefetch
from tests.adapters.spconv import apis
from tests.core.prefetch.conftest import _provider  # noqa: F401 - a fixture

from .graph_sizes import graphs_of
from .pretended import replays_on_the_cpu


@pytest.fixture
def untaught():
    """The stand-in of spconv, where no scene has been seen yet."""
    prefetch.forget()
    with apis.standin() as module:
        yield module
    prefetch.forget()


@pytest.fixture(autouse=True)
def _plain_settings(plain_settings, _provider, rules):  # noqa: F811
    """For every test of this folder. The second call is watched, and the third captured: tests make few. Nothing is
    replayed that is not asked for, as doubles would be."""
    rules.set(policy, CAPTURE=policy.CAPTURE._replace(skip_first=1))
    rules.hold(settings.override(optimize="fuse"))


@pytest.fixture
def uncompared():
    """No replay is compared with the layers, so that a test can count replays."""
    with settings.override(compare_every=0):
        yield


@pytest.fixture
def own_provider():
    """Whoever answers requests for maps afterwards is who did before."""
    before = request.registered()
    yield
    request.register(*before)


@pytest.fixture
def nothing_learnt():
    """Neither of scenes nor of parts of models, before and after; and no model of another test is replayed."""
    for model, _ in graph_regions.tried():
        graph_regions.end(model)
    prefetch.forget()
    model_graphs.forget()
    graph_regions.remove()
    yield
    prefetch.forget()
    model_graphs.forget()
    graph_regions.remove()


@pytest.fixture
def device(kernel_lane, fake_gpu, rules, nothing_learnt):
    """Where models are replayed, from graphs for 512 rows, which is whole tiles: pretended without a GPU."""
    if kernel_lane.device == "cpu":
        replays_on_the_cpu(fake_gpu)
    rules.hold(graphs_of(512))
    return kernel_lane.device
