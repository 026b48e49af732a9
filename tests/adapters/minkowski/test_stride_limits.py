"""Strides and coordinates at the ends of 32-bit integers: exact, or refused."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge.adapters.minkowski.manager import join
from sparse_bridge.adapters.minkowski.maps import MapRegistry
from sparse_bridge.core.geometry import sparse_data
from sparse_bridge.errors import ContractError, CoordinateError, OverflowLimitError

END = torch.iinfo(torch.int32)


def sites(*rows):
    return torch.tensor(rows, dtype=torch.int32)


def at(*xs):
    """Coordinates [N, 3] of these x, with y = 0."""
    return sites(*((0, x, 0) for x in xs))


def tensor(ME, coords, **options):
    return ME.SparseTensor(torch.ones(len(coords), 1), coords, **options)


LAYERS = {
    "kernel 1": lambda ME, s: ME.MinkowskiConvolution(1, 1, kernel_size=1, stride=s, dimension=2),
    "kernel 3": lambda ME, s: ME.MinkowskiConvolution(1, 1, kernel_size=3, stride=s, dimension=2),
    "channelwise": lambda ME, s: ME.MinkowskiChannelwiseConvolution(1, kernel_size=3, stride=s, dimension=2),
    "sum": lambda ME, s: ME.MinkowskiSumPooling(kernel_size=s, stride=s, dimension=2),
    "max": lambda ME, s: ME.MinkowskiMaxPooling(kernel_size=3, stride=s, dimension=2),
    "expand": lambda ME, s: ME.MinkowskiConvolution(
        1, 1, kernel_size=1, stride=s, expand_coordinates=True, dimension=2
    ),
}


@pytest.mark.parametrize("stride", [3, 7, 1000])  # 1000: cells are found by folding equal rows
@pytest.mark.parametrize("name", ["kernel 1", "kernel 3", "channelwise", "max"])
def test_a_cell_that_starts_below_the_range_is_refused(ME, name, stride):
    x = tensor(ME, at(END.min, 1))
    registry, cell = x.coordinate_manager._manager, END.min // stride * stride
    with pytest.raises(CoordinateError, match=rf"\[0, {cell}, 0\] on tensor stride \[{stride}, {stride}\] leaves"):
        LAYERS[name](ME, stride)(x)
    assert list(registry.grids) == [x.coordinate_map_key.key]
    assert not registry.kernel_maps  # the next layer finds nothing half made


def test_a_pool_of_cells_refuses_them_too(ME):
    with pytest.raises(CoordinateError, match=str(END.min - 1)):
        LAYERS["sum"](ME, 3)(tensor(ME, at(END.min, 1)))


def test_expanding_makes_no_coordinate_that_does_not_fit(ME):
    y = LAYERS["expand"](ME, 3)(tensor(ME, at(END.min + 2, 3)))
    assert y.C[:, 1].tolist() == [END.min + 2, 3]


@pytest.mark.parametrize("stride", [1 << 4, 1 << 20, 1 << 30])
def test_cells_at_the_ends_are_exact(ME, stride):
    x = tensor(ME, at(END.min, END.max, 5))
    y = LAYERS["kernel 1"](ME, stride)(x)
    assert y.C[:, 1].tolist() == [END.min, END.max // stride * stride, 0]
    pairs = x.coordinate_manager.stride_map(x.coordinate_map_key, y.coordinate_map_key)
    assert [rows.tolist() for rows in pairs] == [[0, 1, 2], [0, 1, 2]]


def test_the_manager_refuses_such_cells(ME):
    x = tensor(ME, at(END.min, 5))
    manager = x.coordinate_manager
    with pytest.raises(CoordinateError, match=str(END.min - 1)):
        manager.stride(x.coordinate_map_key, 3)
    with pytest.raises(CoordinateError, match=str(END.min - 1)):
        manager.stride(x.coordinate_map_key, [3, 0])


def test_generated_coordinates_above_the_range_are_refused(ME):
    x = tensor(ME, at(END.max - 3, 0), tensor_stride=4)
    assert x.C[0, 1] % 4 == 0
    layer = ME.MinkowskiGenerativeConvolutionTranspose(1, 1, kernel_size=5, stride=2, dimension=2)
    with pytest.raises(CoordinateError, match="leaves 32-bit integers"):
        layer(x)


def test_loose_bounds_refuse_nothing(ME):
    x = tensor(ME, at(END.min, 7, 9))
    y = ME.MinkowskiPruning()(x, torch.tensor([False, True, True]))  # whose bounds are those of x
    z = LAYERS["kernel 3"](ME, 3)(y)
    assert z.C[:, 1].tolist() == [6, 9]
    assert LAYERS["kernel 3"](ME, 2)(z).C[:, 1].tolist() == [6]


def test_a_row_whose_cell_leaves_the_range_has_no_parent(ME):
    """Neither the cell at the other end of the range."""
    x = tensor(ME, at(END.min, 5))
    other = at(END.max // 3 * 3, 3)
    y = tensor(ME, other, tensor_stride=3, coordinate_manager=x.coordinate_manager)
    pairs = x.coordinate_manager.stride_map(x.coordinate_map_key, y.coordinate_map_key)
    assert [rows.tolist() for rows in pairs] == [[1], [1]]


def test_a_replayed_model_refuses_them_too(ME):
    """The coordinates of a model that is replayed come from a graph, and no layer runs."""
    recorded, registry = MapRegistry(2), MapRegistry(2)
    like = recorded.strided(recorded.insert(at(5, 9), (1, 1))[0], (3, 3))
    root = registry.insert(at(END.min, 9), (1, 1))[0]
    wrapped = at(END.max, 9)
    with pytest.raises(CoordinateError, match="leave 32-bit integers"):
        join(registry, root, recorded, like, wrapped)
    assert list(registry.grids) == [root]
    root = registry.pruned(root, torch.tensor([1]))  # whose bounds are too wide
    key = join(registry, root, recorded, like, at(9))
    assert registry.grid(key).lo[1] == END.min


def test_the_usual_layer_reads_no_coordinate(ME, monkeypatch):
    monkeypatch.setattr(sparse_data, "check_multiples", None)
    monkeypatch.setattr("sparse_bridge.adapters.minkowski.grid.check_multiples", None)
    x = tensor(ME, at(-(1 << 30), 1 << 30, 5))
    y = LAYERS["kernel 3"](ME, 3)(x)
    assert y.C[:, 1].tolist() == [-(1 << 30) // 3 * 3, (1 << 30) // 3 * 3, 3]


LARGE = [1 << 31, 1 << 32, 1 << 63, 1 << 70]


@pytest.mark.parametrize("stride", LARGE)
def test_strides_beyond_32_bits_are_refused(ME, stride):
    for name in ("kernel 1", "kernel 3", "channelwise", "max", "expand"):
        with pytest.raises(OverflowLimitError, match=f"kernel_stride is .*{stride}.* at most {END.max}"):
            LAYERS[name](ME, stride)
    with pytest.raises(OverflowLimitError, match="kernel_dilation"):
        ME.MinkowskiConvolution(1, 1, kernel_size=3, dilation=stride, dimension=2)


@pytest.mark.parametrize("stride", LARGE)
def test_tensor_strides_beyond_32_bits_are_refused(ME, stride):
    x, points = tensor(ME, at(0, 5)), at(0, 5).float()
    manager, refused = x.coordinate_manager, pytest.raises(OverflowLimitError, match=f"tensor stride .*{stride}")
    with refused:
        tensor(ME, at(0, 5), tensor_stride=stride)
    with refused:
        ME.TensorField(torch.ones(2, 1), points, tensor_stride=stride)
    with refused:
        ME.TensorField(torch.ones(2, 1), points).sparse(tensor_stride=stride)
    with refused:
        manager.insert_and_map(at(0, 5), stride)
    with refused:
        manager.stride(x.coordinate_map_key, stride)
    with pytest.raises(OverflowLimitError, match="kernel offset"):
        x_stride = [stride, 1]
        ME.MinkowskiKernelGenerator.convert_region_type(ME.RegionType.HYPER_CUBE, x_stride, 3, 1, 1, None, None, 2)


def test_tensor_strides_that_grow_beyond_32_bits_are_refused(ME):
    x = tensor(ME, at(0, 5))
    y = LAYERS["kernel 1"](ME, 1 << 16)(x)
    assert LAYERS["kernel 1"](ME, 1 << 14)(y).tensor_stride == [1 << 30] * 2
    for name in ("kernel 1", "max", "expand"):
        with pytest.raises(OverflowLimitError, match=f"tensor stride .*{1 << 32}"):
            LAYERS[name](ME, 1 << 16)(y)


def test_negative_tensor_strides_are_refused(ME):
    x = tensor(ME, at(0, 5))
    for call in (
        lambda: tensor(ME, at(0, 5), tensor_stride=-2),
        lambda: tensor(ME, at(0, 5), tensor_stride=[1, -1]),
        lambda: ME.TensorField(torch.ones(2, 1), at(0, 5).float()).sparse(tensor_stride=-2),
        lambda: x.coordinate_manager.stride(x.coordinate_map_key, -2),
    ):
        with pytest.raises(ContractError, match="every entry must be 1 or more"):
            call()
    assert tensor(ME, at(0, 5), tensor_stride=0).tensor_stride == [0, 0]
