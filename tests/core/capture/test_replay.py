"""Models replayed from a captured graph compute what they compute ordinarily."""

from __future__ import annotations

import collections
import copy

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge import settings
from sparse_bridge.core.capture import graph_regions, padded
from sparse_bridge.core.late_maps import present
from sparse_bridge.core.ops import pointwise
from tests.checks import assert_close
from tests.clouds import cloud, features

SHAPE = (20, 60, 60)


@pytest.fixture
def sp(untaught):
    return untaught


def network(sp, more=None, width=32):
    """An encoder and decoder with residual blocks, 1x1x1 layers and a concatenation."""

    class Block(sp.SparseModule):
        def __init__(self, width, key):
            super().__init__()
            self.conv1 = sp.SubMConv3d(width, width, 3, bias=False, indice_key=key)
            self.conv2 = sp.SubMConv3d(width, width, 3, bias=True, indice_key=key)
            self.norm1, self.norm2 = nn.BatchNorm1d(width), nn.BatchNorm1d(width)
            self.relu = nn.ReLU()

        def forward(self, x):
            y = self.conv1(x)
            y = self.conv2(y.replace_feature(self.relu(self.norm1(y.features))))
            return y.replace_feature(self.relu(self.norm2(y.features) + x.features))

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = sp.SparseSequential(
                sp.SubMConv3d(4, 16, 3, bias=False, indice_key="a"), nn.BatchNorm1d(16), nn.ReLU()
            )
            self.down = sp.SparseConv3d(16, width, 3, 2, padding=1, bias=False, indice_key="d")
            self.block = Block(width, "b")
            self.last = sp.SparseConv3d(width, width, (3, 1, 1), (2, 1, 1), bias=False, indice_key="e")
            self.up = sp.SparseInverseConv3d(width, 16, 3, indice_key="d")
            self.head = sp.SubMConv3d(32, 8, 1)
            self.mix = nn.Linear(8, 8)  # whose weight autocast keeps a copy of

        def forward(self, x):
            x = self.stem(x)
            y = self.block(self.down(x))
            up = self.up(y)
            out = self.head(up.replace_feature(torch.cat([up.features, x.features], 1)))
            out = out.replace_feature(self.mix(out.features))
            if more is not None:
                out = more(out)
            return {"out": out, "levels": [y, self.last(y).features]}

    torch.manual_seed(0)
    made = Network().eval()
    for module in made.modules():
        if isinstance(module, nn.BatchNorm1d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return made


def scene(sp, seed, share=0.1, dtype=torch.float16, batch_size=2):
    coords = cloud(SHAPE, batch_size, share=share, seed=seed, device="cuda")
    x = features(len(coords), 4, seed, dtype, "cuda")
    return sp.SparseConvTensor(x, coords, list(SHAPE), batch_size)


def compare(found, expected):
    assert list(found) == ["out", "levels"]
    for one, other in ((found["out"], expected["out"]), (found["levels"][0], expected["levels"][0])):
        assert torch.equal(one.indices, other.indices)
        assert one.spatial_shape == other.spatial_shape and one.batch_size == other.batch_size
        assert_close(one.features, other.features, torch.float16)
    assert_close(found["levels"][1], expected["levels"][1], torch.float16)


def alike(model, plain, sp, seed, **how):
    compare(model(scene(sp, seed, **how)), plain(scene(sp, seed, **how)))


def replayer(model):
    return graph_regions.region_of(model).replayer


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


@pytest.mark.gpu
@pytest.mark.usefixtures("no_grad", "uncompared")
class TestOnAGpu:
    @pytest.fixture
    def pair(self, sp):
        """(a model that is replayed, its double that is not), in fp16."""
        plain = network(sp).cuda().half()
        return sparse_bridge.optimize(copy.deepcopy(plain), graphs=True), plain

    def warm(self, model, sp, count=4, **how):
        for seed in range(count):
            model(scene(sp, seed, **how))

    @pytest.fixture
    def warmed(self, sp, pair):
        """`pair`, after scenes that make a graph."""
        self.warm(pair[0], sp)
        return pair

    def test_other_scenes_of_about_the_size(self, sp, warmed):
        model, plain = warmed
        assert len(replayer(model).graphs) == 1 and replayer(model).attempts.failures == 0
        graphs = replayer(model).graphs
        for seed in range(10, 16):
            x = scene(sp, seed, share=0.1 + 0.0005 * seed)
            found = model(x)
            compare(found, plain(scene(sp, seed, share=0.1 + 0.0005 * seed)))
            assert found["out"].indices is x.indices and not present(found["out"].indice_dict)
        assert replayer(model).graphs == graphs, "the same graph served them"

    def test_results_stay_when_the_graph_runs_again(self, sp, warmed):
        model, plain = warmed
        first = model(scene(sp, 20))
        model(scene(sp, 21))
        compare(first, plain(scene(sp, 20)))

    def test_one_graph_serves_other_sizes_and_grids(self, sp, warmed):
        model, plain = warmed
        (graph,) = replayer(model).graphs
        for how in ({"share": 0.02}, {"batch_size": 1}, {"share": 0.05}):
            alike(model, plain, sp, 30, **how)
        assert replayer(model).graphs == [graph]
        alike(model, plain, sp, 31, share=0.4)  # which makes a larger one
        (larger,) = replayer(model).graphs
        assert larger.capacity > graph.capacity
        hits = replayer(model).hits
        for share in (0.4, 0.1, 0.01):
            alike(model, plain, sp, 32, share=share)
        assert replayer(model).hits >= hits + 2 and replayer(model).graphs == [larger]

    def test_a_larger_graph_finds_its_row_numbers(self, sp, pair, rules):
        """Of 1x1x1 layers. To make them waits, and a larger graph has no trial that would."""
        rules.set(pointwise, _LEAST=16, _rows=collections.defaultdict(list))
        rules.set(padded, capacity_of=lambda rows: -(-3 * rows // 2048) * 2048)  # more than the eager call makes
        model, plain = pair
        self.warm(model, sp)
        alike(model, plain, sp, 31, share=0.4)
        hits = replayer(model).hits
        alike(model, plain, sp, 32, share=0.4)
        assert replayer(model).hits == hits + 1 and replayer(model).attempts.failures == 0

    def test_equal_and_outlying_rows(self, sp, warmed):
        model, plain = warmed
        x = scene(sp, 40)
        x.indices[7] = x.indices[1009]
        x.indices[4, 2] = SHAPE[1]
        double = sp.SparseConvTensor(x.features, x.indices.clone(), list(SHAPE), 2)
        compare(model(x), plain(double))

    def test_training_hooks_and_gradients_run_ordinarily(self, sp, warmed):
        model, _ = warmed
        before = len(replayer(model).kinds)
        with torch.enable_grad():
            assert model(scene(sp, 60))["out"].features.requires_grad
        heard = []
        handle = model.block.register_forward_hook(lambda *_: heard.append(1))
        model(scene(sp, 61))
        assert heard == [1]
        handle.remove()
        model.train()
        model(scene(sp, 62))
        model.eval()
        assert len(replayer(model).kinds) == before

    def test_captured_in_inference_mode_and_used_outside(self, sp, pair):
        model, plain = pair
        with torch.inference_mode():
            self.warm(model, sp)
        assert len(replayer(model).graphs) == 1
        alike(model, plain, sp, 63)
        with torch.inference_mode():
            alike(model, plain, sp, 64)

    def test_autocast_and_single_precision(self, sp):
        plain = network(sp).cuda()
        model = sparse_bridge.optimize(copy.deepcopy(plain), graphs=True)
        for dtype in (torch.float16, None):
            with torch.autocast("cuda", dtype, enabled=dtype is not None):
                self.warm(model, sp, dtype=torch.float32)
            with torch.autocast("cuda", dtype, enabled=dtype is not None):
                alike(model, plain, sp, 70, dtype=torch.float32)
        assert len(replayer(model).graphs) == 2

    def test_restore(self, sp, warmed):
        model, plain = warmed
        sparse_bridge.restore(model)
        assert "forward" not in model.__dict__
        alike(model, plain, sp, 80)

    @pytest.mark.parametrize(
        "mixing",
        [
            lambda x: x.replace_feature(x.features - x.features.mean(0)),
            lambda x: x.replace_feature(x.features + x.indices[:, :1].max()),
            lambda x: x.replace_feature(x.features + x.dense().mean()),
            lambda x: x.replace_feature(x.features * (len(x.features) > 5)),
            lambda x: x.replace_feature(x.features + float(x.features.abs().max())),
        ],
        ids=["mean", "indices", "dense", "length", "host"],
    )
    def test_models_that_mix_rows_are_left_alone_or_served(self, sp, mixing):
        plain = network(sp, mixing).cuda().half()
        model = sparse_bridge.optimize(copy.deepcopy(plain), graphs=True)
        self.warm(model, sp, 8)
        for seed in (90, 91):
            alike(model, plain, sp, seed)
        torch.cuda.synchronize()


def test_only_what_can_be_captured_is_considered(sp):
    """Tensors on a CPU run as ever."""
    model = sparse_bridge.optimize(network(sp), graphs=True)
    assert replayer(model).training is not None
    coords = cloud(SHAPE, 2, share=0.01, seed=1)
    x = sp.SparseConvTensor(features(len(coords), 4), coords, list(SHAPE), 2)
    with torch.no_grad():
        for _ in range(4):
            model(x)
    assert not replayer(model).kinds
    model.train()
    for _ in range(4):
        model(x)["out"].features.sum().backward()
    assert not replayer(model).training.kinds and model.stem[0].weight.grad is not None
    model.eval()
    clone = copy.deepcopy(model)
    with torch.no_grad():
        assert_close(clone(x)["out"].features, model(x)["out"].features)
    assert "forward" not in model.__dict__ and graph_regions.region_of(clone) is None
    sparse_bridge.restore(model)
    assert graph_regions.region_of(model) is None


def test_a_limit_on_memory_keeps_models_from_being_replayed():
    """Graphs have memory of their own."""
    with settings.override(optimize="graphs"):
        assert graph_regions.enabled()
        with sparse_bridge.memory_limit("1GiB"):
            assert not graph_regions.enabled()
        assert graph_regions.enabled()
