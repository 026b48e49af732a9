"""What relational convolutions refuse, and the dtypes that they give."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge import errors
from sparse_bridge.core import functional
from sparse_bridge.core.ops import relational_checks
from tests.checks import assert_close, assert_error
from tests.clouds import features

from .test_relational import truth

EDGES = torch.tensor([[0, 1, 2], [1, 2, 0]]), torch.tensor([0, 1, 1])
LAYER = functional.RelationalConv(4, 5, 2)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("numbers", [False, True])
@pytest.mark.parametrize(
    "residual, kind, words",
    [
        (torch.zeros(5), errors.ShapeError, ["[5]", "[3, 5]"]),
        (torch.zeros(1, 5), errors.ShapeError, ["[1, 5]", "[3, 5]"]),
        (torch.zeros(7, 3, 5), errors.ShapeError, ["[7, 3, 5]", "[3, 5]"]),
        (torch.zeros(3, 5).double(), errors.DataTypeError, ["float64", "float32"]),
        (torch.zeros(3, 5).half(), errors.DataTypeError, ["float16", "float32"]),
        (torch.zeros(3, 5, device="meta"), errors.DeviceError, ["meta", "cpu"]),
    ],
    ids=str,
)
def test_a_residual_that_does_not_fit(trains, numbers, residual, kind, words):
    """The same error whether there are gradients or not, and of features as of numbers."""
    x = torch.arange(3) if numbers else torch.ones(3, 4)
    weight = torch.ones(2, 4, 5, requires_grad=trains)
    relations = functional.relation_map(*EDGES, 2, 3)
    assert_error(lambda: functional.relational_conv(x, weight, relations, residual=residual), kind, words)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("numbers", [False, True])
@pytest.mark.parametrize("residual", [None, torch.float32, torch.bfloat16], ids=str)
def test_autocast_gives_its_dtype(trains, numbers, residual):
    x = torch.arange(3) if numbers else features(3, 4)
    weight, relations = features(8, 5, 1).view(2, 4, 5).requires_grad_(trains), functional.relation_map(*EDGES, 2, 3)
    added = None if residual is None else features(3, 5, 2).to(residual).requires_grad_(trains)
    with torch.autocast("cpu", torch.bfloat16):
        y = functional.relational_conv(x, weight, relations, residual=added)
        assert LAYER(x, relations).dtype == torch.bfloat16
    want = truth(x if numbers else x.double(), weight.double(), *EDGES, 3)
    assert y.dtype == torch.bfloat16
    assert_close(y.detach(), (want if added is None else want + added.double()).detach(), torch.bfloat16)
    if trains:
        y.sum().backward()
        assert weight.grad.dtype == torch.float32 and (added is None or added.grad.dtype == residual)
    with torch.autocast("cpu", torch.bfloat16):
        wide = functional.relational_conv(features(3, 4).double(), weight.double(), relations)
        assert wide.dtype == torch.float64


@pytest.mark.parametrize(
    "x, edges, kind, words",
    [
        (torch.ones(3, 3), EDGES, errors.ShapeError, ["3 channels", "4"]),
        (torch.ones(3), EDGES, errors.ShapeError, ["x has shape [3]", "[N, C_in]"]),
        (torch.ones(1, 3, 4), EDGES, errors.ShapeError, ["[1, 3, 4]", "[N, C_in]"]),
        (torch.ones(3, 4).half(), EDGES, errors.DataTypeError, ["float16", "float32", "autocast"]),
        (torch.ones(3, 4).bool(), EDGES, errors.DataTypeError, ["bool", ".float()"]),
        (torch.arange(3).short(), EDGES, errors.DataTypeError, ["int16", ".long()"]),
        (torch.ones(3, 4, dtype=torch.complex64), EDGES, errors.DataTypeError, ["complex64"]),
        (torch.ones(3, 4).long(), EDGES, errors.ShapeError, ["[3, 4]", "numbers of nodes"]),
        (torch.arange(3) + 5, EDGES, errors.CoordinateError, ["node 7", "< 4"]),
        (torch.arange(3) - 1, EDGES, errors.CoordinateError, ["node -1", "< 4"]),
        (torch.ones(3, 4, device="meta"), EDGES, errors.DeviceError, ["meta", "cpu"]),
        (torch.ones(3, 4).to_sparse(), EDGES, errors.UnsupportedError, ["sparse", "to_dense"]),
        ([[1.0] * 4] * 3, EDGES, errors.TensorExpectedError, ["x", "torch.Tensor", "list"]),
        ((torch.ones(3, 4), None), EDGES, errors.TensorExpectedError, ["x[1]", "NoneType"]),
        ((torch.ones(3, 4), torch.ones(3, 3)), EDGES, errors.ShapeError, ["x[1]", "3 channels", "4"]),
        ((torch.ones(3, 4), torch.ones(3, 4).half()), EDGES, errors.DataTypeError, ["x[1]", "float16"]),
        ((torch.ones(3, 4), torch.arange(3) + 2), EDGES, errors.CoordinateError, ["x[1]", "node 4"]),
        ((torch.ones(3, 4),) * 3, EDGES, errors.ShapeError, ["tuple of 3"]),
        (torch.ones(3, 4), (EDGES[0].to("meta"), EDGES[1].to("meta")), errors.DeviceError, ["meta", "values"]),
        (torch.ones(3, 4), (EDGES[0].tolist(), EDGES[1]), errors.TensorExpectedError, ["edge_index", "list"]),
        (torch.ones(3, 4), (EDGES[0].to_sparse(), EDGES[1]), errors.UnsupportedError, ["edge_index", "sparse"]),
        (torch.ones(3, 4), (functional.relation_map(*EDGES, 2, 7, 3),), errors.ShapeError, ["3 target", "7"]),
    ],
    ids=lambda value: None if isinstance(value, torch.Tensor | tuple) else str(value),
)
def test_what_a_layer_refuses(x, edges, kind, words):
    """Before anything is computed."""
    assert_error(lambda: LAYER(x, *edges), kind, words)


def test_a_layer_without_root_needs_no_target_nodes():
    layer = functional.RelationalConv(4, 5, 2, root_weight=False)
    torch.nn.init.ones_(layer.bias)
    x, relations = features(3, 4), functional.relation_map(*EDGES, 2, 7, 3)
    want = functional.relational_conv(x, layer.weight, relations) + 1
    assert torch.equal(layer(x, relations), want)


def test_numbers_are_looked_at_once(calls_of):
    looked = calls_of(relational_checks, "number_bounds")
    wide = functional.RelationalConv(3, 5, 2)
    wide(None, *EDGES)  # in range by themselves
    assert not looked
    assert torch.equal(wide(torch.arange(3), *EDGES), wide(None, *EDGES)) and len(looked) == 1


@pytest.mark.parametrize(
    "change, words",
    [
        ({"num_relations": 0}, ["num_relations is 0", "1 or more"]),
        ({"num_blocks": 0}, ["num_blocks is 0"]),
        ({"num_bases": 0}, ["num_bases is 0"]),
        ({"in_channels": -4}, ["in_channels is -4"]),
        ({"in_channels": (4,)}, ["(4,)", "(source, target)"]),
        ({"out_channels": 4.0}, ["out_channels is 4.0", "integer"]),
        ({"num_blocks": 3}, ["3 blocks"]),
    ],
    ids=str,
)
def test_sizes_of_a_layer(change, words):
    given = {"in_channels": 4, "out_channels": 5, "num_relations": 2}
    assert_error(lambda: functional.RelationalConv(**{**given, **change}), errors.ShapeError, words)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"n_out": 3.0}, ["n_out is 3.0", "integer"]),
        ({"n_in": None, "n_out": 2.5}, ["n_out is 2.5"]),
        ({"n_relations": 2.5}, ["n_relations is 2.5"]),
        ({"n_relations": 1 << 62}, ["2^31"]),
    ],
    ids=str,
)
def test_sizes_of_a_map(change, words):
    given = {"n_relations": 2, "n_out": 3, "n_in": 3}
    assert_error(lambda: functional.relation_map(*EDGES, **{**given, **change}), errors.ShapeError, words)
