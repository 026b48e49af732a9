"""What a trial over a padded input says: that rows are mixed, how far off an output is, or that
nothing can be told."""

from __future__ import annotations

import importlib
import math
import re

import pytest
import torch

import sparse_bridge
from benchmarks.peers import PEERS
from benchmarks.works import fill
from sparse_bridge import settings
from sparse_bridge.adapters import protocol
from sparse_bridge.core.capture import graph_regions
from sparse_bridge.core.capture.calls.counted_norms import counted_norms
from sparse_bridge.core.capture.calls.foreign import ForeignReads
from sparse_bridge.core.capture.comparison import compare
from sparse_bridge.core.geometry.constants import constant
from sparse_bridge.refusals import Refusal, Why
from sparse_bridge.tools.networks.torchsparse import Backbone
from tests.clouds import cloud, features

from . import apis

pytestmark = pytest.mark.usefixtures("nothing_learnt")


def rows(*, at=None, value=0.0, scale=1.0, dtype=torch.float16):
    made = features(40, 3, seed=0, dtype=dtype) * scale
    if at is not None:
        made[at] = value
    return made


NAN, INF = math.nan, math.inf
TRIALS = {
    "rounding": (rows(), rows() * (1 + 2**-9), Why.GRAPH_OTHER_BITS, r"1.9e-03 of its size .* is rounding"),
    "one bit": (rows(at=3, value=1), rows(at=3, value=1 + 2**-10), Why.GRAPH_OTHER_BITS, "in 1 rows"),
    "zeros of two signs": (rows() * 0, -(rows() * 0), None, None),
    "infinite": (rows(at=3, value=INF), rows(at=3, value=INF), None, None),
    "empty": (rows()[:0], rows()[:0], None, None),
    "zero": (rows() * 0, rows() * 0, None, None),
    "mixed": (
        rows(),
        rows(at=slice(3, 8), value=NAN),
        Why.GRAPH_MIXED_ROWS,
        r"mixes rows outside its sparse layers: a, float16 \[40, 3\], is NaN in 5 rows",
    ),
    "scaled": (
        rows(),
        rows(scale=1.1),
        Why.GRAPH_OTHER_BITS,
        r"^it computes something else over a padded input: a, float16 \[40, 3\], is off by "
        r"1\.0e-01 of its size in 40 rows; where that is rounding, .* of torch in fp32 may \[",
    ),
    "one value of zeros": (rows() * 0, rows(at=3, value=1) * 0 + 1, Why.GRAPH_OTHER_BITS, "is off by"),
    "longer": (rows(), rows()[:39], Why.GRAPH_OUTPUT_SHAPE, r"a, float16 \[40, 3\], is float16 \[39, 3\]"),
    "wider": (rows(), rows().float(), Why.GRAPH_OUTPUT_SHAPE, r"is float32 \[40, 3\] over a padded input"),
    "numbers": (
        torch.arange(9),
        torch.arange(9).clamp(max=6),
        Why.GRAPH_OUTPUT_ROWS,
        r"a, int64 \[9\], differs in 2 rows over a padded input \[",
    ),
    "NaN in both": (
        rows(at=3, value=NAN),
        rows(at=3, value=NAN),
        Why.GRAPH_NAN,
        r"^a, float16 \[40, 3\], is NaN in 1 rows, .* nothing: .* ends at 6\.55e\+04 \[",
    ),
    "NaN hides NaN": (rows(at=3, value=NAN), rows(value=NAN, at=...), Why.GRAPH_NAN, "in 1 rows"),
    "overflow there": (rows(at=3, value=INF), rows(at=3, value=6e4), Why.GRAPH_OTHER_BITS, "off by inf"),
    "overflow here": (rows(at=3, value=6e4), rows(at=3, value=INF), Why.GRAPH_OTHER_BITS, "off by inf"),
}


@pytest.mark.parametrize("case", TRIALS)
def test_two_tensors(case):
    expected, found, why, words = TRIALS[case]
    if why is None:
        compare("a", expected, found)
        return
    with pytest.raises(Refusal, match=words) as raised:
        compare("a", expected, found)
    assert raised.value.why is why and ("mixes rows" in str(raised.value)) == (case == "mixed")


class _Tensors:
    def is_norm(self, module):
        return isinstance(module, torch.nn.BatchNorm1d)


def test_norms_have_their_forwards_back():
    """Whatever a trial raises: a model is tried for every kind of call."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3))
    model[1].forward = model[0].forward
    before = [dict(vars(module)) for module in model]
    with pytest.raises(Refusal), counted_norms(model, _Tensors()):
        assert "forward" in vars(model[0]) and vars(model[1])["forward"] is not before[1]["forward"]
        raise Refusal(Why.GRAPH_NO_GRADIENT)
    assert [dict(vars(module)) for module in model] == before


@pytest.mark.parametrize("known", [False, True])
def test_a_function_that_refuses_a_foreign_tensor(known):
    """Losses look at shapes before anything is computed. What they were given is the reason."""
    logits, labels = torch.zeros(5, 3), torch.zeros(4, dtype=torch.long)
    expected = (ValueError, "match") if known else (Refusal, "shape.*4.*GRAPH_FOREIGN_TENSOR")
    with pytest.raises(expected[0], match=expected[1]), ForeignReads([logits, *([labels] if known else [])]):
        torch.nn.functional.cross_entropy(logits, labels)


def test_an_error_of_the_model_beside_a_foreign_tensor():
    labels = torch.zeros(4)
    with pytest.raises(ValueError, match="no"), ForeignReads([]):
        assert len(labels)
        raise ValueError("no")


def test_numbers_of_the_package_are_not_foreign():
    """Sizes of a dense grid, say, which nobody has made before the trial."""
    x = torch.zeros(3)
    with ForeignReads([x]):
        assert (x + constant((70, 81, 92), x.device)).tolist() == [70, 81, 92]
        with pytest.raises(Refusal, match="GRAPH_FOREIGN_TENSOR"):
            torch.tensor([70, 81, 92])


class Followed(torch.nn.Module):
    """A network, and `after` of the rows that it makes."""

    def __init__(self, network, after):
        super().__init__()
        self.network, self.after = network, after

    def forward(self, x):
        found = self.network(x)
        return {**found, "rows": self.after(protocol.features_of(found["out"]))}


def columns_without_end(y):
    return torch.cat([y, y.new_full((len(y), 1), -INF)], 1)


OUTCOMES = {
    "infinite": (columns_without_end, None),
    "mean": (lambda y: y - y.mean(0), r"mixes rows .*: output 2 \(level 0\), float16 .* is NaN in"),
    # Zeros behind the last row would hide it.
    "largest": (lambda y: y - y.amax(0), r"mixes rows .*: output 2 \(level 0\), .* is NaN in"),
    "count": (lambda y: y / len(y), r"^it computes .* output 2 \(level 0\), .* is off by \d\.\de-"),
    "marks": (lambda y: y > y.mean(), r"^output 2 \(level 0\), bool \[.*\], differs in \d+"),
}


def half(module, seed, device, scale=1.0):
    x = apis.scene(module, "torchsparse", seed, device, 0.3 + 0.002 * seed)
    return apis.tensor(module, "torchsparse", x.coords, x.feats.half() * scale)


@pytest.fixture
def replayed(device):
    """The device of models that are replayed."""
    with settings.override(optimize="graphs"), torch.no_grad():
        yield device


def network(module, device, after):
    model = Followed(apis.network(module, "torchsparse", device), after)
    return model.to(device).half().eval()


@pytest.mark.emulated
@pytest.mark.parametrize("case", OUTCOMES)
def test_why_a_model_is_not_replayed(replayed, case):
    """Or that it is: infinite values do not come from rows that do not exist."""
    after, words = OUTCOMES[case]
    with apis.standin("torchsparse") as module:
        model = network(module, replayed, after)
        for seed in range(5):
            model(half(module, seed, replayed))
        (found,) = [one for one in graph_regions.summary() if one.name == "Followed"]
        if words is None:
            assert found == ("Followed", 1, 1, None)
        else:
            assert found.hits == found.graphs == 0 and re.search(words, found.reason), found.reason
            assert ("mixes rows" in found.reason) == (case in ("mean", "largest"))


@pytest.mark.emulated
def test_scenes_that_overflow_show_nothing(replayed):
    """A model is replayed as soon as one does not, and the report says what it waits for."""
    with apis.standin("torchsparse") as module:
        model = network(module, replayed, lambda y: y * 1000 + (y * -1000).relu())
        for seed in range(4):
            found = model(half(module, seed, replayed, 1e4))
        assert bool(found["rows"].isnan().any())
        (waiting,) = graph_regions.summary()
        words = r"output 2 \(level 0\), float16 .* is NaN in \d+ rows, .* ends at 6\.55e\+04"
        assert (waiting.hits, waiting.graphs) == (0, 0) and re.search(words, waiting.reason)
        assert waiting.reason in str(sparse_bridge.report())
        for seed in range(4, 7):
            model(half(module, seed, replayed))
        assert graph_regions.summary() == [("Followed", 2, 1, None)]


@pytest.mark.emulated
@pytest.mark.parametrize("name", ["resnet21d", "unet42"])
def test_backbones_of_torchsparse(replayed, name):
    """In fp16, with the benchmarks' weights: levels end inside their boxes, and all sparse tensors
    that the backbone makes are compared."""
    interface, package, _ = PEERS["bridge_torchsparse"]
    with apis.standin("torchsparse") as module:
        peer = interface("bridge_torchsparse", package)
        importlib.import_module("torchsparse.backbones")
        model = Backbone(module, name, width=0.125)
        fill(peer, model)
        model = model.to(replayed).half().eval()
        for seed in range(5):
            x = scattered(module, seed, replayed)
            found = model(x)
            with settings.override(optimize="off"):
                expected = model(apis.tensor(module, "torchsparse", x.coords, x.feats))
            assert torch.equal(found.coords, expected.coords) and len(found.feats)
            compare("the last output", expected.feats, found.feats)
        assert graph_regions.summary() == [("Backbone", 1, 1, None)]


def scattered(module, seed, device, shape=(40, 37, 40)):
    """A few hundred rows in any order, in a box that ends at odd places."""
    coords = cloud(shape, 1, share=0.007 + 0.00005 * seed, seed=seed, device=device)
    corners = coords.new_tensor([[0, 0, 0, 0], [0, *(extent - 1 for extent in shape)]])
    coords = torch.cat([corners, coords]).unique(dim=0)
    coords = coords[torch.randperm(len(coords), generator=torch.Generator().manual_seed(seed))]
    values = features(len(coords), 4, seed=seed, dtype=torch.float16, device=device)
    return apis.tensor(module, "torchsparse", coords, values)
