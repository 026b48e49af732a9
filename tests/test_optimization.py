"""`optimize(model)`: the same answers, in all three frameworks, and undone."""

from __future__ import annotations

import copy
import functools
import io
from collections import Counter

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge import hooks
from sparse_bridge.core.conv import epilogue
from sparse_bridge.errors import ModelError
from sparse_bridge.refusals import Why
from tests.adapters.spconv import apis
from tests.checks import assert_close
from tests.rules import layers_deferred

APIS = {
    "spconv": apis.standin,  # another test may have imported the wheel
    "torchsparse": functools.partial(sparse_bridge.enable, "torchsparse", mode="standin"),
    "minkowski": functools.partial(sparse_bridge.enable, "minkowski", mode="standin"),
}


@pytest.fixture(autouse=True)
def every_size(rules):
    """Results of any size wait for what follows."""
    rules.hold(layers_deferred())


@pytest.fixture(params=["spconv", "torchsparse", "minkowski"])
def case(request):
    """(model, its inputs, rows of an output) of one framework."""
    torch.manual_seed(0)
    coords = torch.unique(torch.randint(0, 7, (150, 4)) % torch.tensor([2, 7, 7, 7]), dim=0).int()
    feats = torch.randn(len(coords), 4)
    with APIS[request.param]():
        model = settle(MODELS[request.param]())
        yield model, INPUTS[request.param](coords, feats), ROWS[request.param]


def settle(model):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.uniform_(module.weight, -1, 1)
            nn.init.normal_(module.bias)
    return model.eval()


def spconv_model(peek=False):
    import spconv.pytorch as sp

    class Block(sp.SparseModule):
        def __init__(self):
            super().__init__()
            self.stem = sp.SubMConv3d(4, 8, 3, bias=True, indice_key="a")
            self.conv1 = sp.SubMConv3d(8, 8, 3, bias=False, indice_key="a")
            self.conv2 = sp.SubMConv3d(8, 8, 3, bias=False, indice_key="a")
            self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(3))
            self.relu = nn.ReLU()

        def forward(self, x):
            x = self.stem(x)
            x = x.replace_feature(self.relu(self.norms[0](x.features)))
            y = self.conv1(x)
            raw = y.features
            y = self.conv2(y.replace_feature(self.relu(self.norms[1](y.features))))
            y = y.replace_feature(self.norms[2](y.features))
            total = y.features + x.features
            return y.replace_feature(self.relu(total * raw if peek else total))

    return Block()


class Layers(nn.ModuleList):
    """One after another; torch's own container would fuse them without `optimize`."""

    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x


def torchsparse_model():
    import torchsparse.nn as spnn

    return Layers(
        [
            spnn.Conv3d(4, 8, 3, bias=True),
            spnn.BatchNorm(8),
            spnn.ReLU(True),
            spnn.Conv3d(8, 8, 2, stride=2),
            spnn.BatchNorm(8),
            spnn.LeakyReLU(0.1),
            spnn.Conv3d(8, 5, 1),
            spnn.BatchNorm(5),
        ]
    )


def minkowski_model():
    import MinkowskiEngine as ME

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = ME.MinkowskiConvolution(4, 8, kernel_size=3, bias=True, dimension=3)
            self.conv2 = ME.MinkowskiConvolution(8, 8, kernel_size=3, stride=2, dimension=3)
            self.norm1, self.norm2 = ME.MinkowskiBatchNorm(8), ME.MinkowskiBatchNorm(8)
            self.relu = ME.MinkowskiReLU(inplace=True)

        def forward(self, x):
            return self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))

    return Block()


def spconv_input(coords, feats):
    import spconv.pytorch as sp

    return sp.SparseConvTensor(feats, coords, [7, 7, 7], 2)


def torchsparse_input(coords, feats):
    import torchsparse

    return torchsparse.SparseTensor(feats, coords)


def minkowski_input(coords, feats):
    import MinkowskiEngine as ME

    return ME.SparseTensor(feats, coords)


MODELS = {"spconv": spconv_model, "torchsparse": torchsparse_model, "minkowski": minkowski_model}
INPUTS = {"spconv": spconv_input, "torchsparse": torchsparse_input, "minkowski": minkowski_input}
ROWS = {"spconv": lambda x: x.features, "torchsparse": lambda x: x.feats, "minkowski": lambda x: x.F}


@pytest.fixture
def passes(monkeypatch):
    """(norms fused, activations fused, norms run apart), counted."""
    counts = {"norm": 0, "activation": 0, "apart": 0}
    finish, alone = epilogue.Epilogue.finish, torch.batch_norm

    def counted(epilogue, y, dtype):
        counts["norm"] += epilogue.norm is not None
        counts["activation"] += epilogue.activation is not None
        before = counts["apart"]
        y = finish(epilogue, y, dtype)
        counts["apart"] = before
        return y

    def apart(*args, **kwargs):
        counts["apart"] += 1
        return alone(*args, **kwargs)

    monkeypatch.setattr(epilogue.Epilogue, "finish", counted)
    monkeypatch.setattr(torch, "batch_norm", apart)
    monkeypatch.setattr(hooks, "TORCHS_BATCH_NORM", apart)  # else nothing is fused
    return counts


WANTED = {
    "Block": {"norm": 3, "activation": 3, "apart": 0},
    "Layers": {"norm": 2, "activation": 2, "apart": 1},
    "minkowski": {"norm": 2, "activation": 1, "apart": 0},
}


def wanted(model):
    two = sum(isinstance(module, nn.BatchNorm1d) for module in model.modules()) == 2
    return WANTED["minkowski" if two else type(model).__name__]


@pytest.mark.parametrize("how", ["example", "first call"])
def test_fused_equals_plain(case, passes, how):
    model, x, rows = case
    with torch.no_grad():
        want = rows(model(x)).double()
        assert sparse_bridge.optimize(model, *([x] if how == "example" else [])) is model
        if how == "first call":
            assert_close(rows(model(x)), want)
        passes.update(dict.fromkeys(passes, 0))
        found = rows(model(x))
    assert passes == wanted(model)
    assert_close(found, want)


def test_training_and_gradients_stay(case, passes):
    model, x, rows = case
    twin = copy.deepcopy(model)
    sparse_bridge.optimize(model, x)
    passes.update(dict.fromkeys(passes, 0))
    for mode in (True, False):
        model.train(mode), twin.train(mode)
        for net in (model, twin):
            net.zero_grad()
            rows(net(x)).square().sum().backward()
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
    assert passes["norm"] == passes["activation"] == 0


def test_later_parameters_count(case):
    model, x, rows = case
    sparse_bridge.optimize(model, x)
    state = {name: value * 1.5 for name, value in model.state_dict().items() if "num" not in name}
    model.load_state_dict(state, strict=False)
    with torch.no_grad():
        fused = rows(model(x))
        assert_close(fused, rows(sparse_bridge.restore(model)(x)).double())


def test_copies_pickles_and_undoing(case, passes):
    model, x, rows = case
    before = sorted(model.__dict__)
    names = list(model.state_dict())
    sparse_bridge.optimize(model, x)
    assert list(model.state_dict()) == names
    with torch.no_grad():
        want = rows(model(x))
        twin = copy.deepcopy(model)
        for _ in range(3):  # its layers have to learn what follows them
            passes.update(dict.fromkeys(passes, 0))
            assert torch.equal(rows(twin(x)), want)
        assert passes == wanted(model)
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(rows(twin(x)), want), "the copy has parameters of its own"
    with pytest.raises(ModelError, match="already"):
        sparse_bridge.optimize(model)
    sparse_bridge.restore(sparse_bridge.optimize(sparse_bridge.restore(model)))
    assert sorted(twin.__dict__) == before


def test_a_model_that_was_loaded_whole(passes):
    with sparse_bridge.enable("torchsparse", mode="standin"):
        torch.manual_seed(0)
        coords = torch.unique(torch.randint(0, 6, (90, 4)) % torch.tensor([1, 6, 6, 6]), dim=0)
        x = torchsparse_input(coords.int(), torch.randn(len(coords), 4))
        model = sparse_bridge.optimize(settle(torchsparse_model()), x)
        memory = io.BytesIO()
        torch.save(model, memory)
        memory.seek(0)
        loaded = torch.load(memory, weights_only=False)
        with torch.no_grad():
            want = model(x).feats
            for _ in range(3):
                passes.update(dict.fromkeys(passes, 0))
                assert torch.equal(loaded(x).feats, want)
        assert passes == WANTED["Layers"]
        assert sparse_bridge.optimize(loaded) is loaded


def test_whoever_reads_between_sees_the_same():
    with apis.standin():
        torch.manual_seed(0)
        model = settle(spconv_model(peek=True))
        coords = torch.unique(torch.randint(0, 7, (150, 4)) % torch.tensor([2, 7, 7, 7]), dim=0)
        x = spconv_input(coords.int(), torch.randn(len(coords), 4))
        with torch.no_grad():
            want = model(x).features
            sparse_bridge.optimize(model, x)
            for _ in range(3):
                assert torch.equal(model(x).features, want)


def test_hooks_see_what_they_would_see():
    with apis.standin():
        torch.manual_seed(0)
        model, seen = settle(spconv_model()), []
        coords = torch.unique(torch.randint(0, 7, (150, 4)) % torch.tensor([2, 7, 7, 7]), dim=0)
        x = spconv_input(coords.int(), torch.randn(len(coords), 4))
        model.norms[1].register_forward_hook(lambda m, i, o: seen.append(o.clone()))
        with torch.no_grad():
            model(x)
            sparse_bridge.optimize(model, x)
            for _ in range(3):
                model(x)
        assert len(seen) == 7 and all(torch.equal(one, seen[0]) for one in seen)


def test_containers_fuse_by_themselves(passes):
    """Their convolutions keep the shorter way; whatever lies outside is fused all the same."""
    with apis.standin():
        import spconv.pytorch as sp

        torch.manual_seed(0)
        inner = sp.SparseSequential(sp.SubMConv3d(8, 8, 3), nn.BatchNorm1d(8), nn.ReLU())
        model = settle(sp.SparseSequential(spconv_model(), inner))
        coords = torch.unique(torch.randint(0, 7, (150, 4)) % torch.tensor([2, 7, 7, 7]), dim=0)
        x = spconv_input(coords.int(), torch.randn(len(coords), 4))
        with torch.no_grad():
            want = model(x).features.double()
            sparse_bridge.optimize(model, x)
            passes.update(dict.fromkeys(passes, 0))
            assert_close(model(x).features, want)
        assert passes == {"norm": 4, "activation": 4, "apart": 0}
        assert "forward" not in inner[0].__dict__


def test_the_report_names_models_that_are_optimised(case):
    model, x, _ = case
    replayed = f"{type(model).__name__}: 0 calls replayed from 0 graphs"

    def lines():
        """Lines beside those of other tests' models."""
        return Counter(str(sparse_bridge.report()).splitlines()) - before

    before = Counter(str(sparse_bridge.report()).splitlines())
    sparse_bridge.optimize(model, graphs=True)
    assert list(lines()) == [replayed]
    with torch.no_grad():
        for _ in range(3):
            model(x)
    with_reason = f"{replayed}; {Why.GRAPH_DEVICE.says()}"
    assert lines()[with_reason] == 1
    sparse_bridge.restore(model)
    assert with_reason not in lines()


def test_the_example_is_called_until_layers_know_what_follows(case, passes):
    """One call with `graphs`, which an example does not capture, and in training."""
    model, x, _ = case
    calls = []
    handle = next(model.children()).register_forward_hook(lambda *_: calls.append(1))
    for options, mode, count in (({}, False, 3), ({"graphs": True}, False, 1), ({}, True, 1)):
        del calls[:]
        sparse_bridge.restore(sparse_bridge.optimize(model.train(mode), x, **options))
        assert len(calls) == count
    handle.remove()
