"""What follows a convolution in a graph of inference becomes part of it, where nobody notices."""

from __future__ import annotations

import collections

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparse_bridge.compile
from sparse_bridge import settings
from sparse_bridge.core import functional as sparse
from sparse_bridge.core.compile import inductor
from tests.compile.comparison import assert_same
from tests.compile.programs import PROGRAMS, scene
from tests.quick import quick
from tests.releases import WHOLE_GRAPHS

pytestmark = WHOLE_GRAPHS

ROWS, CHANNELS = 40, 6


@pytest.fixture
def layer():
    """A convolution of 6 channels, as a function of features [40, 6], and a norm behind it."""
    torch.manual_seed(0)
    coords = torch.stack([torch.arange(ROWS).int() // step % 4 for step in (99, 16, 4, 1)], 1)
    kmap = sparse.submanifold(sparse.coordinate_map(coords.contiguous()), sparse.kernel_offsets((3, 3, 3)))
    portable = sparse_bridge.compile.portable(kmap)
    weight = torch.randn(27, CHANNELS, CHANNELS)
    norm = nn.BatchNorm1d(CHANNELS).eval()
    norm.running_mean.uniform_()
    norm.running_var.uniform_(0.5, 2)
    return lambda x, w=weight: sparse.conv(x, w, None, portable), norm


def fused(run, *given):
    """How many nodes of each kind the fused graph has, whose result is that of `run`."""
    names: collections.Counter = collections.Counter()

    def backend(module, inputs):
        sparse_bridge.compile.fuse(module.graph)
        module.graph.lint()
        module.recompile()
        nodes = [node for node in module.graph.nodes if node.op.startswith("call")]
        names.update(getattr(n.target, "__name__", str(n.target)).split(".")[0] for n in nodes)
        return module.forward

    torch._dynamo.reset()
    y = torch.compile(run, backend=backend, fullgraph=True)(*given)
    assert_same(y, run(*given))
    return names


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "case",
    quick(
        [("torchsparse", "unet", 13), ("minkowski", "three", 3), ("spconv", "three", 3)],
        [
            ("spconv", "unet", 17),
            ("patched spconv", "unet", 17),
            ("torchsparse", "unet", 13),
            ("minkowski", "unet", 25),
            ("minkowski", "three", 3),
            ("spconv", "three", 3),
        ],
    ),
    ids=lambda case: "-".join(map(str, case)),
)
def test_networks(case, plain_settings):
    api, network, count = case
    with PROGRAMS[api]() as programs, torch.no_grad():
        program = programs[network]().eval()
        names = fused(program, *scene(0))
        assert names["conv_fused"] == count and not names["conv"], names
        if network == "three":
            assert not names["batch_norm"] and not names["relu"]


def test_with_gradients_nothing_is_fused(plain_settings):
    with PROGRAMS["torchsparse"]() as programs:
        names = fused(programs["three"]().eval(), *scene(0))
    assert names["conv"] == 3 and not names["conv_fused"]


ENDS = {
    "norm": lambda y, x, norm: norm(y),
    "norm, relu": lambda y, x, norm: norm(y).relu_(),
    "sum": lambda y, x, norm: x + y,
    "sum in place, leaky": lambda y, x, norm: F.leaky_relu(y.add_(x), 0.2),
    "norm, sum, sigmoid": lambda y, x, norm: torch.sigmoid(norm(y) + x),
    "relu": lambda y, x, norm: F.relu(y, inplace=True),
}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_what_is_fused(name, dtype, layer, plain_settings):
    conv, norm = layer
    x = torch.randn(ROWS, CHANNELS, dtype=dtype)
    weight = torch.randn(27, CHANNELS, CHANNELS, dtype=dtype)

    def run(x):
        return ENDS[name](conv(x, weight), x, norm).float()

    with torch.no_grad():
        if dtype == torch.float32:
            assert fused(run, x) == {"conv_fused": 1, "float": 1}
            return
        seen = []
        torch._dynamo.reset()

        def backend(module, inputs):
            seen.append(sparse_bridge.compile.fuse(module.graph))
            module.recompile()
            return module.forward

        y = torch.compile(run, backend=backend, fullgraph=True)(x)
        torch.testing.assert_close(y, run(x), rtol=3e-2, atol=0.3)
        assert seen == [1]


def read_twice(y, x, norm):
    z = norm(y)
    return z.relu() + z


def overwritten(y, x, norm):
    x.mul_(2)
    return norm(y)


def overwritten_view(y, x, norm):
    x[:3].zero_()
    return norm(y) + x


def other_dtype(y, x, norm):
    return y + x.double()


def to_the_other(y, x, norm):
    z = x * 1
    z += y
    return z


def twice(y, x, norm):
    return y + y


def of_the_batch(y, x, norm):
    return F.batch_norm(y, None, None, training=True)


def broadcast(y, x, norm):
    return y + x[:1]


def after_the_sum(y, x, norm):
    return norm(y + x)


@pytest.mark.parametrize(
    ("end", "left"),
    [
        (read_twice, "relu"),
        (overwritten, "batch_norm"),
        (overwritten_view, "batch_norm"),
        (other_dtype, "add"),
        (to_the_other, "iadd"),
        (twice, "add"),
        (of_the_batch, "batch_norm"),
        (broadcast, "add"),
        (after_the_sum, "batch_norm"),
    ],
)
def test_what_stays(end, left, layer, plain_settings):
    conv, norm = layer
    given = torch.randn(ROWS, CHANNELS)

    def run(given):
        x = given.clone()
        return end(conv(x), x, norm)

    with torch.no_grad():
        names = fused(run, given)
    assert names[left] >= 1, names


class TestInductor:
    def test_it_fuses(self, layer, plain_settings):
        from torch._inductor.utils import run_and_get_code

        conv, norm = layer
        x = torch.randn(ROWS, CHANNELS)
        torch._dynamo.reset()
        with torch.no_grad():
            compiled = torch.compile(lambda x: norm(conv(x)).relu(), fullgraph=True)
            y, codes = run_and_get_code(compiled, x)
            assert_same(y, norm(conv(x)).relu())
        assert "sparse_bridge.conv_fused.default" in codes[0] and "cpp_fused" not in codes[0]

    def test_passes_of_others_stay(self, plain_settings):
        from torch._inductor import config

        calls = []
        with config.patch(pre_grad_custom_pass=calls.append):
            inductor.install()
            made, graph = config.pre_grad_custom_pass, torch.fx.Graph()
            made(graph)
        assert calls == [graph] and made.uuid() is None

    def test_optimize_off_leaves_graphs(self, monkeypatch, plain_settings):
        from torch._inductor import config

        seen = []
        monkeypatch.setattr(inductor.fusion, "fuse", seen.append)
        with config.patch(pre_grad_custom_pass=None):
            inductor.install()
            made = config.pre_grad_custom_pass
        on = made.uuid()
        with settings.override(optimize="off"):
            made(torch.fx.Graph())
            assert on and made.uuid() != on and not seen
        made(torch.fx.Graph())
        assert len(seen) == 1
