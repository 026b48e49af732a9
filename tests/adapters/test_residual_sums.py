"""Residual blocks: sums in the convolution's own store, as the frameworks' users write them."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn

from sparse_bridge.core.conv import epilogue
from tests.adapters.spconv import apis
from tests.checks import assert_close
from tests.residual_blocks import minkowski_blocks, spconv_blocks, torchsparse_blocks
from tests.rules import layers_deferred
from tests.test_optimization import APIS, INPUTS, ROWS, settle


@pytest.fixture(autouse=True)
def every_size(rules):
    """Results of any size wait."""
    rules.hold(layers_deferred())


def learn(model, x):
    """Calls after which layers know what follows them."""
    for _ in range(3):
        model(x)


@pytest.fixture
def fused(monkeypatch):
    """(norms, residuals, activations) of each convolution, in order."""
    seen, finish = [], epilogue.Epilogue.finish

    def noted(end, y, dtype):
        seen.append((end.norm is not None, end.residual is not None, end.activation))
        return finish(end, y, dtype)

    monkeypatch.setattr(epilogue.Epilogue, "finish", noted)
    return seen


FIRST, LAST = (True, False, "relu"), (True, True, "relu")
BLOCKS = {"spconv": spconv_blocks, "torchsparse": torchsparse_blocks, "minkowski": minkowski_blocks}


def scene():
    torch.manual_seed(0)
    coords = torch.unique(torch.randint(0, 7, (150, 4)) % torch.tensor([2, 7, 7, 7]), dim=0).int()
    return coords, torch.randn(len(coords), 4)


@contextlib.contextmanager
def spconv(build):
    """(model, its input)"""
    with apis.standin():
        x = INPUTS["spconv"](*scene())
        yield settle(build()), x


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_each_framework(name, fused):
    with APIS[name](), torch.no_grad():
        x, rows = INPUTS[name](*scene()), ROWS[name]
        model = settle(BLOCKS[name]())
        clone = copy.deepcopy(model)
        want = rows(clone(x)).double()
        learn(model, x)
        del fused[:]
        found = rows(model(x))
        assert fused == [FIRST, *[FIRST, LAST] * 2]
        assert_close(found, want)
        assert type(found) is torch.Tensor
        assert_close(rows(copy.deepcopy(model)(x)), want)


@pytest.mark.parametrize("relu", [nn.ReLU(True), nn.LeakyReLU(0.2), nn.Sigmoid()], ids=str)
def test_activations_behind_the_sum(relu, fused):
    with spconv(lambda: spconv_blocks(relu=relu, bias=True)) as (model, x), torch.no_grad():
        want = copy.deepcopy(model)(x).features.double()
        learn(model, x)
        del fused[:]
        assert_close(model(x).features, want)
        kind = {"ReLU": "relu", "LeakyReLU": "leaky_relu", "Sigmoid": "sigmoid"}
        name = kind[type(relu).__name__]
        assert fused[1:] == [(True, False, name), (True, True, name)] * 2


def quietly(y, x):
    y.features.add_(x.features)
    return y


def into(y, x):
    rows = y.features
    rows += x.features
    return y.replace_feature(rows)


def twice(y, x):
    return y.replace_feature(y.features + x.features + x.features)


PLUS = {
    "other way": (lambda y, x: y.replace_feature(x.features + y.features), LAST),
    "torch.add": (lambda y, x: y.replace_feature(torch.add(y.features, x.features)), LAST),
    "in place": (into, LAST),
    # Of three operands the first two are one sum; the activation follows the second.
    "three": (twice, (True, True, None)),
    "of a scaled one": (lambda y, x: y.replace_feature(y.features + 2 * x.features), LAST),
    "weighted": (lambda y, x: y.replace_feature(torch.add(y.features, x.features, alpha=2)), (True, False, None)),
    "in place on the tensor": (quietly, None),
}


@pytest.mark.parametrize("name", PLUS)
def test_ways_to_add(name, fused):
    plus, last = PLUS[name]
    with spconv(lambda: spconv_blocks(plus=plus)) as (model, x), torch.no_grad():
        want = copy.deepcopy(model)(x).features.double()
        learn(model, x)
        for _ in range(2):
            del fused[:]
            assert_close(model(x).features, want)
        assert last is None or fused[1:] == [FIRST, last] * 2


def test_a_layer_on_the_way_around(fused):
    """Its convolution comes after the one that waits, and takes the same map."""
    with apis.standin(), torch.no_grad():
        import spconv.pytorch as sp

        class Skip(sp.SparseModule):
            def __init__(self):
                super().__init__()
                self.conv = sp.SubMConv3d(8, 8, 3, indice_key="a")

            def forward(self, x):
                return self.conv(x)

        x = INPUTS["spconv"](*scene())
        model = settle(spconv_blocks(skip=Skip()))
        want = copy.deepcopy(model)(x).features.double()
        learn(model, x)
        del fused[:]
        assert_close(model(x).features, want)
        # Both wait: the one around is computed when the other one meets it.
        assert sorted(map(str, fused[1:4])) == sorted(map(str, [FIRST, (False, False, None), LAST]))


def test_norms_before_the_layers(fused):
    """Blocks that end in a convolution: the sum follows it without a norm."""
    with apis.standin(), torch.no_grad():
        import spconv.pytorch as sp

        class Before(sp.SparseModule):
            def __init__(self):
                super().__init__()
                self.branch = sp.SparseSequential(
                    nn.BatchNorm1d(8),
                    nn.ReLU(),
                    sp.SubMConv3d(8, 8, 3, indice_key="a"),
                    nn.BatchNorm1d(8),
                    nn.ReLU(),
                    sp.SubMConv3d(8, 8, 3, indice_key="a"),
                )

            def forward(self, x):
                y = self.branch(x)
                return y.replace_feature(y.features + x.features)

        x = INPUTS["spconv"](*scene())
        stem = sp.SubMConv3d(4, 8, 3, indice_key="a")
        model = settle(sp.SparseSequential(stem, Before(), Before(), nn.BatchNorm1d(8)))
        want = copy.deepcopy(model)(x).features.double()
        learn(model, x)
        del fused[:]
        assert_close(model(x).features, want)
        assert fused == [(False, False, None), *[FIRST, (False, True, None)] * 2]


def test_layers_without_a_norm(fused):
    with apis.standin(), torch.no_grad():
        import spconv.pytorch as sp

        x = INPUTS["spconv"](*scene())
        model = settle(
            sp.SparseSequential(
                sp.SubMConv3d(4, 8, 3, indice_key="a"),
                nn.LeakyReLU(0.3),
                sp.SubMConv3d(8, 8, 3, indice_key="a"),
                nn.ReLU(),
            )
        )
        want = copy.deepcopy(model)(x).features.double()
        learn(model, x)
        del fused[:]
        assert_close(model(x).features, want)
        assert fused == [(False, False, "leaky_relu"), (False, False, "relu")]


class Moody(nn.Module):
    """Adds or does not; who reads in between changes with it."""

    def __init__(self):
        super().__init__()
        self.block = spconv_blocks()
        self.adds = True
        for block in list(self.block)[1:]:
            block.plus = self.plus

    def plus(self, y, x):
        return y.replace_feature(y.features + x.features) if self.adds else y

    def forward(self, x):
        return self.block(x)


def test_later_calls_may_do_without_the_sum(fused):
    with spconv(Moody) as (model, x), torch.no_grad():
        clone = copy.deepcopy(model)
        clone.adds = False
        for block in list(clone.block)[1:]:
            block.plus = clone.plus
        learn(model, x)
        model.adds = False
        del fused[:]
        assert_close(model(x).features, clone(x).features.double())
        assert fused[1:5] == [FIRST, (True, False, None)] * 2


def test_whoever_takes_the_sum_besides(fused):
    """The activation stays apart where somebody else reads what it takes."""
    with spconv(spconv_blocks) as (model, x), torch.no_grad():
        sums = []

        def kept(y, x):
            out = y.features + x.features
            sums.append(out)
            return y.replace_feature(out)

        for block in list(model)[1:]:
            block.plus = kept
        want = copy.deepcopy(model)

        class Both(nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def forward(self, x):
                del sums[:]
                out = self.inner(x).features
                return out + sum(sums)

        whole = Both(model).eval()
        plain = Both(want)(x).double()
        learn(whole, x)
        del fused[:]
        assert_close(whole(x), plain)
        assert fused[1:] == [FIRST, (True, True, None)] * 2


def test_extensions_that_ask_for_memory_keep_the_sums_apart(fused):
    """Norms and activations are fused all the same."""

    def plus(y, x):
        torch.Tensor.data_ptr(y.features)  # as an extension does: no operation of torch's
        return y.replace_feature(y.features + x.features)

    with spconv(lambda: spconv_blocks(plus=plus)) as (model, x), torch.no_grad():
        want = copy.deepcopy(model)(x).features.double()
        learn(model, x)
        del fused[:]
        assert_close(model(x).features, want)
        assert fused[1:] == [FIRST, (True, False, None)] * 2


def test_whoever_takes_the_convolution_besides(fused):
    """Its norm stays apart, the other layers do not."""
    with spconv(spconv_blocks) as (model, x), torch.no_grad():
        block, raw = model[1], []
        block.conv1.register_forward_hook(lambda layer, given, out: raw.append(out.features))
        block.plus = lambda y, x: y.replace_feature(y.features + raw.pop())
        want = copy.deepcopy(model)(x).features.double()
        learn(model, x)
        del fused[:]
        assert_close(model(x).features, want)
        assert fused[1:] == [(False, False, None), LAST, FIRST, LAST]
