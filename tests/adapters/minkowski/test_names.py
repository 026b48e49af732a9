"""Names and keywords of 0.5.4 that code calls by name."""

from __future__ import annotations

import importlib

import pytest
import torch

from sparse_bridge.adapters.minkowski import geometry
from sparse_bridge.adapters.minkowski.errors import ArgumentValueError


@pytest.fixture
def field(ME):
    coords = torch.tensor([[0, 0.1, 0.2], [0, 1.5, 2.0], [1, 0, 0]])
    return ME.TensorField(torch.randn(3, 2), coords)


def test_maps_by_keyword(ME, field):
    manager, x = field.coordinate_manager, field.sparse()
    items, rows = manager.origin_field_map(key=field.coordinate_field_map_key)
    assert items.tolist() == [0, 1] and [part.tolist() for part in rows] == [[0, 1], [2]]
    items, rows = manager.origin_map(key=x.coordinate_map_key)
    assert items.tolist() == [0, 1] and [len(part) for part in rows] == [2, 1]


def test_forwards_by_keyword(ME, field):
    x = field.sparse()
    norm = ME.MinkowskiStableInstanceNorm(2)
    assert torch.equal(norm(x=x).F, norm(x).F)
    assert ME.MinkowskiToFeature()(x=x) is x.F and ME.MinkowskiToFeature()(x=field) is field.F
    with pytest.raises(AssertionError, match="MinkowskiToFeature"):
        ME.MinkowskiToFeature()(x=x.F)
    stack = ME.MinkowskiStackSum(ME.MinkowskiReLU(), ME.MinkowskiReLU())
    assert torch.equal(stack(x=x).F, 2 * x.F.relu())
    channels = ME.MinkowskiChannelwiseConvolution(2, 3, dimension=2)
    assert channels.kernel_shape == (9, 2) == tuple(channels.kernel.shape)


def test_means_of_listed_rows(ME):
    spmm_average = importlib.import_module("MinkowskiEngine.sparse_matrix_functions").spmm_average
    rows, cols = torch.tensor([2, 0, 2]).int(), torch.tensor([1, 0, 0]).int()
    mat = torch.tensor([[1.0, 2.0], [3.0, 6.0]], dtype=torch.float64, requires_grad=True)
    out, coo, vals = spmm_average(rows, cols, torch.Size([3, 2]), mat)
    assert out.tolist() == [[1, 2], [0, 0], [2, 4]]
    assert coo.tolist() == [[0, 2, 2], [0, 1, 0]] and vals.tolist() == [1, 0.5, 0.5]
    assert torch.equal(ME.spmm(coo[0], coo[1], vals, [3, 2], mat), out)
    assert torch.autograd.gradcheck(lambda m: spmm_average(rows, cols, [3, 2], m)[0], (mat,))


def test_the_text_of_a_summary(ME, field, capsys):
    module = importlib.import_module("MinkowskiEngine.utils.summary")
    net = torch.nn.Sequential(ME.MinkowskiLinear(2, 3), ME.MinkowskiReLU())
    text, counts = module.minkowski_summary_string(net, field)
    assert "ReLU" in text and counts == (9, 9) and not capsys.readouterr().out
    assert module.summary(net, field) == counts and capsys.readouterr().out == text + "\n"


def test_numbers_per_axis(ME):
    """Whole numbers, also without an axis; nothing is cut off."""
    as_list = ME.convert_to_int_list
    for value in (2, 2.0, torch.tensor(2), torch.tensor(2.0)):
        assert as_list(value, 3) == [2, 2, 2]
    assert as_list(torch.tensor([1, 2]), 2) == [1, 2] == as_list((1, 2.0), 2)
    for value in (
        2.5,
        [1, 0.5],
        float("nan"),
        [1, float("inf")],
        torch.tensor(1.5),
        [1, "a"],
        [1, "2"],
    ):
        with pytest.raises(ArgumentValueError, match="whole number"):
            geometry.int_list(value, 2)
    with pytest.raises(ArgumentValueError, match="whole number"):
        ME.MinkowskiConvolution(1, 1, kernel_size=2.5, dimension=2)
