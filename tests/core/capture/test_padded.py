"""A network over a padded input computes what it computes over the scene itself."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from types import SimpleNamespace

import pytest
import torch

from sparse_bridge import settings
from sparse_bridge.adapters.spconv.protocol import PROTOCOL
from sparse_bridge.core.capture import padded
from sparse_bridge.core.capture.calls.call import call_of
from sparse_bridge.core.capture.calls.number_tensors import NumberTensors
from sparse_bridge.core.capture.captured_maps import builder_over
from sparse_bridge.core.capture.padded import PaddedInput, capacity_of
from sparse_bridge.core.capture.replay_trial import PaddedModel
from sparse_bridge.core.device.device_support import kernel_target
from sparse_bridge.core.geometry.boxes import Box
from sparse_bridge.core.maps import rows
from sparse_bridge.core.prefetch import prefetch
from sparse_bridge.kernels.maps import mask_order
from sparse_bridge.refusals import Refusal
from tests.adapters.spconv import apis
from tests.clouds import cloud, features

pytestmark = [pytest.mark.emulated, pytest.mark.usefixtures("nothing_learnt")]

SHAPE = (12, 10, 14)
BOX = Box.grid(2, SHAPE)


@pytest.fixture
def sp():
    with apis.standin() as module:
        yield module


class Network(torch.nn.Module):
    """Two levels, an inverse layer and a pool."""

    def __init__(self, sp, pooled=False):
        super().__init__()
        torch.manual_seed(0)
        self.stem = sp.SubMConv3d(4, 8, 3, bias=True, indice_key="a")
        self.down = sp.SparseConv3d(8, 8, 3, 2, padding=1, bias=False, indice_key="d")
        self.norm = torch.nn.BatchNorm1d(8)
        self.deep = sp.SubMConv3d(8, 8, 3, bias=False, indice_key="b")
        self.up = sp.SparseInverseConv3d(8, 4, 3, indice_key="d")
        self.pool = sp.SparseMaxPool3d(3, 2, padding=1, indice_key="p") if pooled else None

    def forward(self, x):
        x = self.stem(x)
        y = self.down(x)
        y = y.replace_feature(self.norm(y.features).relu())
        y = self.deep(y)
        pooled = None if self.pool is None else self.pool(y)
        return self.up(y), y, pooled


def spread(coords, capacity):
    """(padded coordinates, count)."""
    more = coords.new_zeros((capacity, 4))
    more[: len(coords)] = coords
    return more, torch.full((1,), len(coords) - 1, dtype=torch.int32, device=coords.device)


def tensor(sp, coords, x=None):
    x = features(len(coords), 4, seed=len(coords), device=coords.device) if x is None else x
    return sp.SparseConvTensor(x, coords, list(SHAPE), 2)


def learnt(sp, network, lane, seeds=(1, 2, 3)):
    for seed in seeds:
        network(tensor(sp, cloud(SHAPE, share=0.2, seed=seed, device=lane.device)))
    return prefetch.recording_of(torch.zeros(1, device=lane.device).device, BOX)


@pytest.fixture
def known(sp, kernel_lane):
    """(a network, the recording of its scenes)."""
    network = Network(sp).eval().to(kernel_lane.device)
    with torch.no_grad():
        return network, learnt(sp, network, kernel_lane)


def prepared(coords, record, capacity, **how):
    """A padded input whose maps are built, and the rows of its levels."""
    scene = PaddedInput(*spread(coords, capacity), record, **how)
    target = kernel_target(coords.device)
    builder = builder_over(scene, BOX, target, tuple(record.steps))
    assert builder.lay_out()
    scene.prepared = builder.queued(), builder.coords()
    scene.estimates = scene.validated(scene.counters.tolist(), scene.flags.tolist(), len(coords))
    return scene, scene.estimates


def over_padded(sp, network, coords, record, capacity):
    """(output, padded input, rows of its levels)."""
    scene, rows = prepared(coords, record, capacity, padding_value=float("nan"))
    x = torch.full((capacity, 4), float("nan"), device=coords.device)
    x[: len(coords)] = features(len(coords), 4, seed=len(coords), device=coords.device)
    with padded.using(scene):
        found = network(tensor(sp, scene.coords.detach(), x))
    return found, scene, rows


@pytest.fixture
def one_by_one():
    """Layers are not fused with what follows, which rounds otherwise."""
    with settings.override(optimize="off"):
        yield


@torch.no_grad()
@pytest.mark.usefixtures("one_by_one")
def test_requests_over_the_recorded_scene_that_come_later(sp, kernel_lane):
    """As of another thread, while a graph is captured."""
    network = Network(sp).eval().to(kernel_lane.device)
    learnt(sp, network, kernel_lane)
    network(last := tensor(sp, cloud(SHAPE, share=0.2, seed=9, device=kernel_lane.device)))
    record = prefetch.recording_of(last.indices.device, BOX)
    coords = cloud(SHAPE, share=0.22, seed=7, device=kernel_lane.device)
    expected = network(tensor(sp, coords))[0]
    scene, _ = prepared(coords, record, len(coords) + 200, padding_value=0.0)
    sp.SubMConv3d(4, 8, 5, indice_key="later").to(kernel_lane.device)(last)
    x = torch.zeros((len(scene.coords), 4), device=coords.device)
    x[: len(coords)] = features(len(coords), 4, seed=len(coords), device=coords.device)
    with padded.using(scene):
        found = network(tensor(sp, scene.coords.detach(), x))[0]
    assert torch.equal(found.features[: len(coords)], expected.features)


@torch.no_grad()
def test_the_last_scene_may_be_another_threads(sp, known, kernel_lane):
    """Which may be in the middle of it, with requests and views still to come."""
    network, record = known
    scene = functools.partial(cloud, SHAPE, share=0.2, device=kernel_lane.device)

    def elsewhere():
        with torch.no_grad():
            network(tensor(sp, scene(seed=8)))

    assert record is not None
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert prefetch.recording_of(scene(seed=8).device, BOX) is None
    network(tensor(sp, last := scene(seed=9)))
    assert prefetch.recording_of(last.device, BOX) is not None
    assert prefetch.recording_of(last.device, BOX, n_rows=len(last)) is not None
    assert prefetch.recording_of(last.device, BOX, n_rows=len(last) - 1) is None  # another input's


@pytest.mark.parametrize("pooled", [False, True])
@torch.no_grad()
@pytest.mark.usefixtures("one_by_one")
def test_rows_are_those_of_the_scene(sp, kernel_lane, pooled):
    network = Network(sp, pooled).eval().to(kernel_lane.device)
    record = learnt(sp, network, kernel_lane)
    coords = cloud(SHAPE, share=0.22, seed=7, device=kernel_lane.device)
    expected = network(tensor(sp, coords))
    found, scene, rows = over_padded(sp, network, coords, record, len(coords) + 200)
    assert rows is not None and len(set(scene.capacities.values())) == len(scene.capacities) == 2 + pooled
    levels = (*sorted(rows), -1)[:3]
    for level, one, other in zip(levels, found, expected, strict=True):
        if other is None:
            assert not pooled
            continue
        n_rows = rows[level]
        assert n_rows == len(other.indices) <= len(one.indices) == scene.capacities[level]
        assert torch.equal(one.indices[:n_rows], other.indices)
        assert torch.equal(one.features[:n_rows], other.features)
        if level:
            assert (one.indices[n_rows:] == one.indices[:1]).all()  # harmless as addresses


@torch.no_grad()
def test_counters_tell_what_cannot_be_served(sp, kernel_lane, known):
    _, record = known
    coords = cloud(SHAPE, share=0.2, seed=8, device=kernel_lane.device)
    equal, outside = coords.clone(), coords.clone()
    equal[5] = equal[17]
    outside[3, 1] = SHAPE[0]
    lone = coords[::9].contiguous()  # grows more from level to level than the estimate
    for case, served in ((coords, True), (equal, False), (outside, False), (lone, True)):
        _, rows = prepared(case, record, len(coords) + 64)
        assert (rows is not None) == served


@torch.no_grad()
def test_levels_have_room_for_what_the_largest_scenes_made(sp, kernel_lane, rules):
    """Small scenes make more rows of a row; estimates for a large capacity do not go by theirs, those for a small one
    do."""
    rules.set(padded, _SPARE=0, _STEP=1)
    network, made = Network(sp).eval().to(kernel_lane.device), {}
    for number, share in enumerate((0.01, 0.05, 0.06, 0.01)):
        coords = cloud(SHAPE, share=share, seed=number, device=kernel_lane.device)
        made[len(coords)] = len(network(tensor(sp, coords))[1].indices)
    record = prefetch.recording_of(coords.device, BOX)
    small, large = min(made), max(made)
    assert made[small] / small > 1.5 * made[large] / large
    scene, rows = prepared(cloud(SHAPE, share=0.06, seed=2, device=kernel_lane.device), record, large + 5)
    assert rows is not None and scene.capacities[2] == int(1.125 * made[large] * (large + 5) / large)
    scene, rows = prepared(coords, record, small)
    assert rows is not None and scene.capacities[2] == int(1.25 * small * (made[small] / small))


@torch.no_grad()
def test_a_level_that_outgrows_its_room(sp, kernel_lane, known):
    _, record = known
    coords = cloud(SHAPE, share=0.5, seed=9, device=kernel_lane.device)
    small = dataclasses.replace(record, rows=dict.fromkeys(record.rows, 1), largest={})
    assert prepared(coords, record, len(coords))[1] is not None
    assert prepared(coords, small, len(coords))[1] is None


@torch.no_grad()
@pytest.mark.usefixtures("one_by_one")
def test_room_to_spare_does_not_change_the_order(sp, kernel_lane, known, rules):
    """Up to so many rows are sorted apart, whatever there is memory for."""
    rules.set(mask_order, FEW_ROWS=120)
    network, record = known
    coords = cloud(SHAPE, share=0.03, seed=3, device=kernel_lane.device)
    expected = network(tensor(sp, coords))
    found, scene, rows = over_padded(sp, network, coords, record, 200)
    assert len(coords) < 120 < len(scene.coords) and rows is not None
    for one, other in zip(found[:2], expected[:2], strict=True):
        assert torch.equal(one.features[: len(other.features)], other.features)


@torch.no_grad()
def test_what_needs_the_rows_says_so(sp, kernel_lane, known):
    _, record = known
    coords = cloud(SHAPE, share=0.2, seed=8, device=kernel_lane.device)
    other = sp.SubMConv3d(4, 4, 5, indice_key="z").to(kernel_lane.device)
    with pytest.raises(Refusal, match="number of rows on the host"):
        over_padded(sp, other, coords, record, len(coords) + 64)
    assert padded.current() is None and not rows.in_scope()
    other(tensor(sp, coords)).dense()


def test_dense_grids_hold_the_rows_that_there_are(sp, kernel_lane, known):
    _, record = known
    coords = cloud(SHAPE, share=0.2, seed=8, device=kernel_lane.device)
    scene, found = prepared(coords, record, len(coords) + 64)[0], []
    for wide in (False, True):
        x = torch.full((len(coords) + 64 * wide, 4), float("nan"), device=coords.device)
        x[: len(coords)] = features(len(coords), 4, seed=3, device=coords.device)
        x.requires_grad_()
        with padded.using(scene) if wide else contextlib.nullcontext():
            grid = tensor(sp, scene.coords.detach() if wide else coords, x).dense()
        grid.square().sum().backward()
        found.append((grid, x.grad))
        assert scene.grids == ({2} if wide else set())
    (grid, gradient), (other, padded_gradient) = found
    assert torch.equal(grid, other) and scene.used(other, {}) == 2
    assert torch.equal(gradient, padded_gradient[: len(coords)])
    assert not padded_gradient[len(coords) :].any()


def test_a_history_is_two_scenes_alike(sp, kernel_lane):
    network = Network(sp).eval().to(kernel_lane.device)
    with torch.no_grad():
        assert learnt(sp, network, kernel_lane, seeds=(1,)) is None
        assert learnt(sp, network, kernel_lane, seeds=(2, 3)) is not None


def test_rooms_come_in_few_sizes():
    sizes = [capacity_of(rows) for rows in range(1, 100_000, 7)]
    assert all(size >= rows for size, rows in zip(sizes, range(1, 100_000, 7), strict=True))
    assert sizes == sorted(sizes) and len(set(sizes)) < 16
    assert all(size <= 1.51 * rows for size, rows in zip(sizes, range(1, 100_000, 7), strict=True) if rows > 5000)


class Block(torch.nn.Module):
    """Norms in training, a residual sum and layers of one offset beside the network."""

    def __init__(self, sp):
        super().__init__()
        self.body, self.mix = Network(sp), sp.SubMConv3d(4, 6, 1)
        self.norm, self.relu = torch.nn.BatchNorm1d(6), torch.nn.ReLU()
        self.head = torch.nn.Linear(6, 5)

    def forward(self, x):
        up, deep, _ = self.body(x)
        y = self.mix(up.replace_feature(up.features + x.features))
        y = y.replace_feature(self.head(self.relu(self.norm(y.features))))
        return {"y": y, "deep": deep.features}


class Mixing(Block):
    """What must not be replayed: every row hears of all others."""

    def forward(self, x):
        found = super().forward(x)
        y = found["y"]
        return {**found, "y": y.replace_feature(y.features - y.features.mean(0))}


class Replacing(Block):
    """A buffer that is another tensor after each call."""

    def __init__(self, sp):
        super().__init__(sp)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls = self.calls + 1
        return super().forward(x)


class Counting(Block):
    """A buffer of whole numbers that hears of the rows."""

    def __init__(self, sp):
        super().__init__(sp)
        self.register_buffer("most", torch.zeros(1, dtype=torch.int64))

    def forward(self, x):
        self.most.clamp_(min=len(x.features))
        return super().forward(x)


class Recording(Block):
    """spconv's own way to do that."""

    def __init__(self, sp):
        super().__init__(sp)
        self.body.down = sp.SparseConv3d(8, 8, 3, 2, padding=1, bias=False, indice_key="d", record_voxel_count=True)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Block, None),
        (Mixing, "mixes rows"),
        (Replacing, "place of calls"),
        (Counting, "most differs"),
        (Recording, "recording the number of voxels"),
    ],
)
def test_training_over_a_padded_scene(sp, kernel_lane, kind, words):
    """Outputs, gradients and buffers are those of the scene alone, or it is said why not."""
    model = kind(sp).train().to(kernel_lane.device)
    for seed in (1, 2, 3):
        x = tensor(sp, cloud(SHAPE, share=0.2, seed=seed, device=kernel_lane.device))
        found = model(x)
        (found["y"].features.sum() + found["deep"].sum()).backward()
    record = prefetch.recording_of(x.features.device, BOX, training=True)
    coords = cloud(SHAPE, share=0.22, seed=7, device=kernel_lane.device)
    x = tensor(sp, coords)
    x.features.requires_grad_()
    scene, rows = prepared(coords, record, len(coords) + 130)
    expected = contextlib.nullcontext()
    if words is not None:
        expected = pytest.raises(Refusal, match=words)
    with expected:
        call = call_of((x,), {}, lambda _: PROTOCOL, set())
        call = call._replace(buffers={name: buffer.clone() for name, buffer in model.named_buffers()})
        owner = SimpleNamespace(
            model=model, run_layers=model.forward, reads=set(), numbers=NumberTensors(), memory=None
        )
        PaddedModel(owner, call, coords, BOX).verify(scene, rows, model(x))
