"""Arguments of the wrong kind, as configurations and hurried programs give them: typed errors that name them."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from sparse_bridge import errors

COORDINATES = torch.tensor([[0, 1, 1], [0, 1, 2], [1, 0, 1]], dtype=torch.int32)


def tensor(ME):
    return ME.SparseTensor(torch.arange(9.0).view(3, 3), COORDINATES)


@pytest.mark.parametrize("dimension", ["2", 2.0, [2], None, 0])
def test_dimension(ME, dimension):
    for make in (ME.MinkowskiConvolution, ME.MinkowskiConvolutionTranspose):
        with pytest.raises(errors.SparseBridgeError, match="dimension="):
            make(3, 3, 3, dimension=dimension)
    with pytest.raises(errors.SparseBridgeError, match="dimension="):
        ME.MinkowskiMaxPooling(2, 2, dimension=dimension)
    with pytest.raises(errors.SparseBridgeError, match="D="):
        ME.CoordinateManager(D=dimension)


@pytest.mark.parametrize("generator", [3, "cube", torch.ones(1)])
def test_kernel_generator(ME, generator):
    makers = [ME.MinkowskiConvolution, ME.MinkowskiConvolutionTranspose, ME.MinkowskiGenerativeConvolutionTranspose]
    calls = [lambda make=make: make(3, 3, 3, kernel_generator=generator, dimension=2) for make in makers]
    calls += [lambda: ME.MinkowskiChannelwiseConvolution(3, 3, kernel_generator=generator, dimension=2)]
    calls += [lambda: ME.MinkowskiMaxPooling(2, 2, kernel_generator=generator, dimension=2)]
    for call in calls:
        with pytest.raises(errors.SparseBridgeError, match=r"expected an ME\.KernelGenerator") as info:
            call()
        assert isinstance(info.value, AttributeError)


@pytest.mark.parametrize("dimension", [2, np.int64(2), torch.tensor(2)])
def test_dimension_is_any_integer(ME, dimension):
    assert len(ME.MinkowskiConvolution(3, 3, 3, dimension=dimension)(tensor(ME))) == 3


def test_dimension_of_a_graph(ME):
    """Of coordinates with any number of columns it is symbolic, and looked at like others."""
    layer = ME.MinkowskiConvolution(3, 3, 3, dimension=2)

    def network(features, coordinates):
        return layer(ME.SparseTensor(features, coordinates)).F

    torch._dynamo.reset()
    x = tensor(ME)
    compiled = torch.compile(network, backend="eager", fullgraph=True, dynamic=True)
    assert torch.allclose(compiled(x.F, COORDINATES), network(x.F, COORDINATES))


@pytest.mark.parametrize("name", ["kernel_size", "stride", "dilation"])
def test_errors_name_the_argument(ME, name):
    given = {"kernel_size": 3, name: "3"}
    with pytest.raises(errors.SparseBridgeError, match=f"{name} is '3'"):
        ME.MinkowskiConvolution(3, 3, dimension=2, **given)


def test_keys(ME):
    x = tensor(ME)
    manager, field = x.coordinate_manager, ME.TensorField(torch.ones(3, 3), COORDINATES.float())
    key = field.sparse().coordinate_map_key
    calls = {
        "size": lambda: manager.size(1),
        "origin_field_map": lambda: manager.origin_field_map(1),
        "union_map": lambda: manager.union_map([1], ME.CoordinateMapKey(3)),
        "field_to_sparse_map": lambda: field.coordinate_manager.field_to_sparse_map(x, key),
        "inverse_mapping": lambda: field.inverse_mapping(x),
    }
    for name, call in calls.items():
        with pytest.raises(errors.SparseBridgeError, match="expected a CoordinateMapKey") as info:
            call()
        assert isinstance(info.value, TypeError), name
    with pytest.raises(errors.DataTypeError, match="batch index is '0'"):
        x.features_at("0")


def test_boxes_and_shapes(ME):
    x = tensor(ME)
    for given in (3, [0, 0], torch.zeros(3, dtype=torch.int32)):
        with pytest.raises(errors.ContractError, match="min_coords is"):
            x.sparse(min_coords=given)
        with pytest.raises(errors.ContractError, match="max_coords is"):
            x.sparse(max_coords=given)
    for shape in (3, "abc", None):
        with pytest.raises(errors.ContractError, match="shape is"):
            ME.dense_coordinates(shape)


def test_samples(ME):
    coordinates, features = torch.zeros(2, 2), torch.ones(2, 3)
    with pytest.raises(errors.ContractError, match=r"expected \(coordinates, features, labels\)"):
        ME.utils.SparseCollation()([(coordinates, features)])
    for sample in ((coordinates,), 3):
        with pytest.raises(errors.ContractError, match=r"expected \(coordinates, features\)"):
            ME.utils.batch_sparse_collate([sample])
    with pytest.raises(errors.TensorExpectedError, match=r"expected for feats\[1\], got list"):
        ME.utils.sparse_collate([coordinates, coordinates], [features, features.tolist()])
    samples = iter([(coordinates, features), (coordinates, features)])
    assert len(ME.utils.batch_sparse_collate(samples)[0]) == 4


@pytest.mark.parametrize("name", ["F", "features"])
def test_assigned_features(ME, name):
    """What torchsparse and spconv 1.x allow; the error says what to write instead."""
    x = tensor(ME)
    for given in (x, ME.TensorField(x.F, COORDINATES.float())):
        with pytest.raises(AttributeError, match=r"ME\.SparseTensor\(features, coordinate_map_key=") as info:
            setattr(given, name, x.F * 2)
        assert isinstance(info.value, errors.SparseBridgeError)
    y = ME.SparseTensor(x.F * 2, coordinate_map_key=x.coordinate_map_key, coordinate_manager=x.coordinate_manager)
    assert torch.equal(y.features, 2 * x.features)


def test_slices_between_managers_compare_coordinates(ME):
    """Equal keys of two managers say nothing of each other; upstream mixes rows up."""
    x = tensor(ME)
    same = ME.SparseTensor(x.F, x.C)
    assert torch.equal(same.slice(x).F, x.F)
    other = ME.SparseTensor(x.F, COORDINATES.flip(0).contiguous())
    with pytest.raises(errors.ContractError, match="between two coordinate managers"):
        other.slice(x)
    with pytest.raises(errors.ContractError, match="between two coordinate managers"):
        other.cat_slice(x)


@pytest.mark.parametrize("kind", ["Avg", "Max", "Sum"])
def test_a_trace_of_a_global_pooling_is_refused(ME, kind):
    """It would hold the batch items of the rows of this one input."""
    x = tensor(ME)
    pooling = getattr(ME, f"MinkowskiGlobal{kind}Pooling")()
    pooling(x)  # its rows by item are at hand

    def pooled(features):
        given = ME.SparseTensor(
            features, coordinate_map_key=x.coordinate_map_key, coordinate_manager=x.coordinate_manager
        )
        return pooling(given).F

    with warnings.catch_warnings(), pytest.raises(errors.UnsupportedError, match=r"torch\.jit\.trace"):
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        torch.jit.trace(pooled, (x.F,), check_trace=False)
