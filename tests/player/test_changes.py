"""What a model changes in place or keeps from call to call, and rows on other axes than the first one."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge.export import ExportError
from sparse_bridge.export.player.record import record
from tests.adapters.spconv import apis

from . import networks

pad, conv1d = torch.nn.functional.pad, torch.nn.functional.conv1d


@pytest.fixture
def sp():
    with apis.standin() as module:
        yield module


def recorded(model):
    return record(networks.ready(model), networks.scene((8, 8, 8), 50), 64, "cuda:87")


class Stateful(torch.nn.Module):
    """A layer, and what a function makes of it. Tensors may stay from one call to the next."""

    def __init__(self, sp, behind, channels=16):
        super().__init__()
        self.sp, self.behind, self.layer = sp, behind, sp.SubMConv3d(4, channels, 3)
        self.along, self.over = torch.nn.Conv1d(2, 2, 3, padding=1), torch.nn.Conv3d(16, 4, 3, padding=1)
        self.register_buffer("state", torch.ones(16))
        self.listed, self.last, self.table = [torch.ones(16)], torch.zeros(1), None

    def replaced(self, name, value):
        old = getattr(self, name)
        setattr(self, name, value)
        return old

    def forward(self, features, coords):
        return self.behind(self, self.layer(self.sp.SparseConvTensor(features, coords, [8, 8, 8], 2)))


IN_PLACE = {
    "a constant that a step reads": (
        lambda m, x: [x.features * (s := torch.linspace(1, 2, 16)), x.features + s.add_(1)],
        "changes a tensor .* was read before",
    ),
    "a buffer": (lambda m, x: x.features * m.state.add_(1), r"changes a tensor \[16\] in place that is a weight"),
    "a buffer, later": (lambda m, x: [x.features * m.state, m.state.mul_(2)], "changes a tensor"),
    "a weight": (lambda m, x: [x.features, m.layer.weight.data.mul_(2)], "changes a tensor"),
    "what lies in a list": (lambda m, x: x.features * m.listed[0].add_(1), "changes a tensor"),
    "another buffer": (lambda m, x: x.features * m.replaced("state", m.state * 2), "reads 'state', which its last"),
    "a grid of the last call": (lambda m, x: x.dense() + m.replaced("last", x.dense()), "reads 'last', which its last"),
    "out": (lambda m, x: torch.add(x.features, 1, out=torch.empty_like(x.features)), r"aten\.add\.out, which writes"),
    "a part of out": (
        lambda m, x: torch.mul(x.features, 2, out=torch.zeros(len(x.features), 32)[:, 16:]),
        "which writes to `out`",
    ),
}


@pytest.mark.parametrize("case", IN_PLACE)
def test_what_would_differ_from_run_to_run_is_refused(sp, case):
    """A package plays the same steps over the same constants, as they were in the end."""
    behind, words = IN_PLACE[case]
    with pytest.raises(ExportError, match=words):
        recorded(Stateful(sp, behind))


def test_constants_of_a_models_own(sp):
    """Made and changed before a step reads them; kept for later, or made again with the same values."""

    def behind(m, x):
        m.table = torch.linspace(0, 1, 16) if m.table is None else m.table
        m.last, m.listed = x.features, [x.features]
        m.state = torch.ones(16)
        own = torch.tensor([1.0, 2.0] * 8)
        own[2] = 7
        own.mul_(2)
        return x.features * own * m.state * m.table

    program = recorded(Stateful(sp, behind))
    own = torch.tensor([2.0, 4.0, 14.0, *[4.0, 2.0] * 6, 4.0])
    assert own.numpy().tobytes() in {constant.data for constant in program.constants}


@pytest.mark.parametrize(
    ("behind", "words"),
    [
        (lambda m, x: x, r"output 1 of the model, \[2, 64\], has rows on another axis"),
        (lambda m, x: (x * 2).clone(), r"output 1 of the model, \[2, 64\], has rows on another axis"),
        (lambda m, x: m.along(x[None])[0].t(), r"along \(Conv1d\), .* calls aten\.convolution"),
        (lambda m, x: torch.cat([x, x], 1).t(), r"calls aten\.cat"),
        (lambda m, x: pad(x[None], (1, 1))[0], r"calls aten\.constant_pad_nd"),
        (lambda m, x: torch.nn.functional.layer_norm(x.contiguous(), x.shape[1:]), r"calls aten\.native_layer_norm"),
    ],
)
def test_rows_on_another_axis_are_treated_alike_or_refused(sp, behind, words):
    """Where they end is not known: neither for a convolution along them, nor in a result. Beside a grid of as many
    batch items as there are channels."""
    with pytest.raises(ExportError, match=words):
        recorded(Stateful(sp, lambda m, x: [x.dense(), behind(m, x.features.t())], 2))


def test_rows_on_another_axis_may_come_back(sp):
    def behind(m, x):
        channels_first = x.features.t()[None]
        return [x.dense(), conv1d(pad(channels_first, (0, 0, 0, 0)), m.along.weight[:, :, :1])[0].t()]

    program = recorded(Stateful(sp, behind, 2))
    assert [(output.level, output.shape) for output in program.outputs[1:]] == [(0, (64, 2))]


ALIASES = {
    "permuted, then the grid": lambda y: [y.permute(0, 2, 3, 4, 1).contiguous(), y.relu_()],
    "permuted, then it": lambda y: [y, y.permute(0, 2, 3, 4, 1).contiguous().relu_()],
    "contiguous, then the grid": lambda y: [y.contiguous(), y.relu_()],
    "contiguous, then it": lambda y: [y, y.contiguous().relu_()],
    "flattened, of a sum": lambda y: [z := y + 1, z.flatten(1).relu_()],
}


@pytest.mark.parametrize("name", ALIASES)
def test_grids_whose_memory_others_share_by_their_strides(sp, name):
    """A convolution over a grid leaves channels side by side, unlike torch."""
    with pytest.raises(ExportError, match="in place that a convolution over a grid has made"):
        recorded(Stateful(sp, lambda m, x: ALIASES[name](m.over(x.dense()))))


def test_grids_may_be_changed_before_they_are_permuted(sp):
    recorded(Stateful(sp, lambda m, x: m.over(x.dense()).relu_().permute(0, 2, 3, 4, 1).contiguous().sigmoid()))
