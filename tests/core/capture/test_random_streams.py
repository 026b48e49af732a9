"""Random streams through a network: shapes, rows, empty batch items, modes, weights changed in
place, checkpoints, exceptions and threads. Whatever is prefetched, fused or replayed, every scene
gives what it gives one by one.
"""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
import os

import pytest
import torch
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from sparse_bridge import settings
from sparse_bridge.adapters import protocol
from sparse_bridge.core.capture import graph_regions
from sparse_bridge.core.prefetch import prefetch
from tests.core.capture.graph_sizes import graphs_of
from tests.rules import layers_deferred

from . import apis
from .pretended import replays_on_the_cpu

pytestmark = pytest.mark.emulated

SHAPES = [apis.SHAPE, (9, 4, 6), (5, 11, 3)]
STREAMS = int(os.environ.get("SPARSE_BRIDGE_TEST_STREAMS", "0"))


@dataclasses.dataclass(frozen=True)
class Scene:
    """A call: with a backward pass where `trains`, by two threads at once where `twice` (they only
    look), with an exception from the middle of the network where `breaks`."""

    seed: int
    shape: int
    batch_size: int
    empty: bool
    trains: bool
    twice: bool
    breaks: bool


@dataclasses.dataclass(frozen=True)
class Change:
    """What happens to the model between calls."""

    kind: str


scenes = st.builds(
    Scene,
    st.integers(0, 99),
    st.sampled_from([0, 0, 0, 1, 2]),
    st.sampled_from([2, 2, 1, 3]),
    st.sampled_from([False] * 5 + [True]),
    st.sampled_from([False, False, True]),
    st.sampled_from([False] * 5 + [True]),
    st.sampled_from([False] * 9 + [True]),
)
alike = st.builds(
    lambda trains: [Scene(seed, 0, 2, False, trains, False, False) for seed in range(7)], st.booleans()
)  # after which maps, or the whole network, are prepared
changes = st.builds(Change, st.sampled_from(["scaled", "loaded", "replaced", "frozen", "moved"]))
events = st.lists(st.one_of(scenes, scenes, scenes, scenes, changes), min_size=4, max_size=16)


@pytest.fixture
def untaught(rules):
    """Nothing learnt yet, and everything tried at the second or third scene of a kind."""
    rules.hold(graphs_of(160), layers_deferred())

    def forget():
        prefetch.forget()
        graph_regions.remove()

    yield forget
    forget()


class Broken(Exception):
    pass


def _break(*_):
    raise Broken


def made(module, name, scene, device):
    """The input; rows of the batch's first item are missing where that is empty."""
    x = apis.scene(module, name, scene.seed, device, 0.25, scene.batch_size, SHAPES[scene.shape])
    if not scene.empty or scene.batch_size == 1:
        return x
    framework = protocol.of(x)
    coords, values = framework.coordinates_of(x), framework.features_of(x)
    kept = coords[:, 0] != 0
    return apis.tensor(module, name, coords[kept], values[kept], SHAPES[scene.shape])


def results(model, x):
    found = model(x)
    framework = protocol.of(found["out"])
    return [(framework.coordinates_of(found[key]), framework.features_of(found[key])) for key in found]


def run(model, module, name, scene, device):
    """What a scene gives: coordinates and features; with gradients where it trains."""
    model.train(scene.trains)
    if scene.breaks:
        hook = model.deep.register_forward_hook(_break)
        try:
            with torch.set_grad_enabled(scene.trains), pytest.raises(Broken):
                model(made(module, name, scene, device))
        finally:
            hook.remove()
        return []
    if scene.trains:
        model.zero_grad(set_to_none=True)
        seen = results(model, made(module, name, scene, device))
        sum(values.square().mean() for _, values in seen).backward()
        return seen
    inputs = [made(module, name, scene, device) for _ in range(1 + scene.twice)]

    def look(x):
        with torch.no_grad():
            return results(model, x)

    if not scene.twice:
        return look(inputs[0])
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        one, other = pool.map(look, inputs)
    same(one, other, exact=True)
    return one


def change(model, kind, saved):
    """Weights as programs change them; `saved`: a checkpoint of the model."""
    with torch.no_grad():
        weights = [p for p in model.parameters() if p.ndim > 1]
        if kind == "scaled":
            weights[0].mul_(1.25)
        elif kind == "replaced":
            weights[1].data = weights[1].data.flip(0).clone()
        elif kind == "moved":
            model.stem[0].register_parameter(
                next(iter(dict(model.stem[0].named_parameters()))), torch.nn.Parameter(weights[0].clone())
            )
        elif kind == "frozen":
            weights[-1].requires_grad_(not weights[-1].requires_grad)
        else:
            model.load_state_dict(saved)


def same(mine, theirs, exact):
    assert len(mine) == len(theirs)
    for (coords, values), (rows, expected) in zip(mine, theirs, strict=True):
        assert torch.equal(coords, rows) and values.dtype == expected.dtype
        if exact:
            assert torch.equal(values, expected)
        else:
            torch.testing.assert_close(values, expected, rtol=1e-3, atol=1e-4)


def same_state(model, plain, exact):
    """Gradients and statistics; then the same again, so that rounding does not add up."""
    apis.same_gradients(model, plain, 0.0 if exact else 2e-3)
    for one, other in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        one.copy_(other)


@pytest.mark.parametrize("optimize", ["off", "fuse", "graphs"])
@pytest.mark.parametrize("name", apis.NAMES)
def test_streams_are_what_their_scenes_are(map_lane, fake_gpu, untaught, built, name, optimize):
    device = map_lane.device
    if device == "cpu" and map_lane.kernels:
        replays_on_the_cpu(fake_gpu)
    number = STREAMS or (60 if device == "cuda" else 2)

    @given(alike, events)
    @examples(
        max_examples=number,
        derandomize=not STREAMS,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    def check(start, rest):
        untaught()
        plain = apis.network(module, name, device)
        model, saved = copy.deepcopy(plain), copy.deepcopy(plain.state_dict())
        exact = optimize == "off"
        for turn, event in enumerate([*start, *rest]):
            if isinstance(event, Change):
                for one in (model, plain):
                    change(one, event.kind, saved)
                continue
            built.clear()
            with settings.override(optimize=optimize):
                mine = run(model, module, name, event, device)
            if map_lane.kernels and turn == len(start) - 1:
                assert not built, "nothing was prepared"
                replayed = optimize == "graphs" and device == "cpu"
                assert sum(one.hits for one in graph_regions.summary()) >= replayed, graph_regions.summary()
            with settings.override(optimize="off", capture="off"):
                theirs = run(plain, module, name, event, device)
            same(mine, theirs, exact)
            if event.trains and not event.breaks:
                same_state(model, plain, exact)

    with apis.standin(name) as module:
        check()
