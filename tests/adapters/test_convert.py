"""Sparse tensors from framework to framework, and networks that use two or three of them."""

from __future__ import annotations

import contextlib
import importlib
import sys

import pytest
import torch

import sparse_bridge
from sparse_bridge.adapters import convert as converting
from sparse_bridge.core.geometry.sparse_data import SparseData
from sparse_bridge.errors import (
    CoordinateError,
    DataTypeError,
    DeviceError,
    GeometryError,
    LifecycleError,
    OverflowLimitError,
    SettingError,
    ShapeError,
    SparseBridgeError,
)
from tests.clouds import cloud

NAMES = ("spconv", "torchsparse", "minkowski")
MODULES = {"spconv": "spconv.pytorch", "torchsparse": "torchsparse", "minkowski": "MinkowskiEngine"}


@pytest.fixture
def frameworks(plain_settings):
    """All three stand-ins at once; an installed spconv steps aside."""
    real = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in ("spconv", "cumm")}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        stack.enter_context(sparse_bridge.enable(*NAMES, mode="standin"))
        yield {name: importlib.import_module(module) for name, module in MODULES.items()}
    torch.set_num_threads(threads)
    sys.modules.update(real)


@contextlib.contextmanager
def in_release(target):
    """The framework's name, under a profile if `target` says which."""
    name, _, profile = target.partition(" ")
    if not profile:
        yield name
        return
    sparse_bridge.disable(name)
    with sparse_bridge.enable(name, mode="standin", profile=profile):
        yield name


def scene(seed=0, channels=4, dimension=3, dtype=torch.float32):
    """Rows in random order; item 1 of 3 is empty."""
    coords = cloud((7, 6, 5)[:dimension], 3, 0.2, seed, empty_items=(1,))
    generator = torch.Generator().manual_seed(seed)
    feats = torch.randn(len(coords), channels, generator=generator).to(dtype)
    return feats.requires_grad_(), coords


def make(frameworks, name, feats, coords):
    if name == "spconv":
        return frameworks[name].SparseConvTensor(feats, coords, [7, 6, 5], 3)
    if name == "torchsparse":
        return frameworks[name].SparseTensor(feats, coords)
    return frameworks[name].SparseTensor(feats, coords)


def rows(x, name):
    """(features, coordinates in cells of x's grid) of a tensor of any framework."""
    if name == "spconv":
        return x.features, x.indices
    if name == "torchsparse":
        return x.feats, x.coords
    step = x.C.new_tensor([1, *x.tensor_stride])
    return x.F, torch.div(x.C, step, rounding_mode="floor")


@pytest.mark.parametrize("source", NAMES)
@pytest.mark.parametrize("target", NAMES)
def test_every_direction(frameworks, source, target):
    feats, coords = scene()
    x = make(frameworks, source, feats, coords)
    y = sparse_bridge.convert(x, to=target)
    assert converting.framework_of(y) == target
    got, sites = rows(y, target)
    assert torch.equal(got, feats) and torch.equal(sites.int(), coords)
    up = torch.randn_like(feats)
    got.backward(up)
    assert torch.equal(feats.grad, up)
    back = sparse_bridge.convert(y, to=source, like=x)
    got, sites = rows(back, source)
    assert torch.equal(got, feats) and torch.equal(sites.int(), coords)


@pytest.mark.parametrize("name", NAMES)
def test_core_form(frameworks, name):
    feats, coords = scene()
    data = sparse_bridge.convert(make(frameworks, name, feats, coords), to="core")
    assert isinstance(data, SparseData) and data.dimension == 3
    assert torch.equal(data.feats, feats) and torch.equal(data.coords, coords)
    assert data.coords.dtype == torch.int32 and data.tensor_stride == (1, 1, 1)
    assert data.batch_size in (None, 3)
    assert data.spatial_shape == ((7, 6, 5) if name == "spconv" else None)
    again = sparse_bridge.convert(data, to=name)
    assert torch.equal(rows(again, name)[0], feats)


def test_a_coarse_tensor_keeps_its_grid(frameworks):
    ME = frameworks["minkowski"]
    feats, coords = scene()
    x = ME.SparseTensor(feats, coords)
    y = ME.MinkowskiSumPooling(2, 2, dimension=3)(x)
    data = sparse_bridge.convert(y, to="core")
    assert data.tensor_stride == (2, 2, 2) and data.batch_size == 3
    assert torch.equal(data.coords[:, 1:] * 2, y.C[:, 1:])
    sp = sparse_bridge.convert(y, to="spconv", spatial_shape=(4, 3, 3))
    assert sp.spatial_shape == [4, 3, 3] and sp.batch_size == 3
    back = sparse_bridge.convert(sp, to="minkowski", tensor_stride=(2, 2, 2), like=y)
    assert back.coordinate_map_key == y.coordinate_map_key and torch.equal(back.C, y.C)
    up = ME.MinkowskiPoolingTranspose(2, 2, dimension=3)(back)
    assert up.coordinate_map_key == x.coordinate_map_key


def test_like_joins_the_caches_of_the_target(frameworks):
    ME = frameworks["minkowski"]
    feats, coords = scene()
    x = ME.SparseTensor(feats, coords)
    sp = sparse_bridge.convert(x, to="spconv")
    doubled = sp.replace_feature(sp.features * 2)
    back = sparse_bridge.convert(doubled, to="minkowski", like=x)
    assert back.coordinate_manager is x.coordinate_manager
    assert torch.equal((back + x).F, 3 * feats) and len(ME.cat(back, x)) == len(x)
    fewer = sp.replace_feature(sp.features)
    fewer.indices, fewer.features = sp.indices[5:].contiguous(), sp.features[5:]
    other = sparse_bridge.convert(fewer, to="minkowski", like=x)
    assert other.coordinate_map_key != x.coordinate_map_key
    assert len(other + x) == len(x)


def test_a_network_of_two_frameworks(frameworks):
    """Voxels averaged and looked up by MinkowskiEngine, an encoder of spconv (as OneFormer3D)."""
    ME, sp = frameworks["minkowski"], frameworks["spconv"]
    torch.manual_seed(0)
    points = torch.rand(400, 4) * 6
    points[:, 0] = torch.arange(400) % 2
    colour = torch.randn(400, 6, requires_grad=True)
    field = ME.TensorField(colour, points)
    voxels = field.sparse()
    batch_size = voxels.coordinate_manager.number_of_unique_batch_indices()
    shape = (voxels.C[:, 1:].amax(0) + 1).tolist()
    x = sp.SparseConvTensor(voxels.F, voxels.C, shape, batch_size)
    net = sp.SparseSequential(
        sp.SubMConv3d(6, 8, 3, padding=1, indice_key="a", bias=False),
        torch.nn.BatchNorm1d(8),
        torch.nn.ReLU(),
        sp.SparseConv3d(8, 12, 2, stride=2, indice_key="down"),
        sp.SparseInverseConv3d(12, 5, 2, indice_key="down"),
    )
    y = net(x)
    out = y.features[field.inverse_mapping(voxels.coordinate_map_key)]
    again = sparse_bridge.convert(y, to="minkowski", like=voxels).slice(field)
    assert torch.equal(again.F, out)
    out.square().sum().backward()
    assert torch.isfinite(colour.grad).all() and colour.grad.abs().sum(1).gt(0).all()


def test_one_convolution_in_all_three(frameworks):
    """The same submanifold weights give the same rows in every framework."""
    feats, coords = scene(2, dtype=torch.float64)
    torch.manual_seed(1)
    values = torch.randn(3, 3, 3, 4, 5, dtype=torch.float64)  # k1, k2, k3, in, out
    ME, sp, ts = (frameworks[name] for name in ("minkowski", "spconv", "torchsparse"))
    mine = ME.MinkowskiConvolution(4, 5, kernel_size=3, dimension=3).double()
    theirs = sp.SubMConv3d(4, 5, 3, padding=1, bias=False).double()
    other = ts.nn.Conv3d(4, 5, 3, bias=False).double()
    with torch.no_grad():
        mine.kernel.copy_(values.permute(2, 1, 0, 3, 4).reshape(27, 4, 5))
        theirs.weight.copy_(values.permute(4, 0, 1, 2, 3))
    x = ME.SparseTensor(feats, coords)
    want = theirs(sparse_bridge.convert(x, to="spconv")).features
    torch.testing.assert_close(mine(x).F, want)
    y = other(sparse_bridge.convert(x, to="torchsparse"))
    assert y.feats.shape == want.shape and torch.equal(y.coords.int(), coords)
    back = sparse_bridge.convert(y, to="minkowski", like=x) + mine(x)
    back.F.sum().backward()
    assert feats.grad is not None
    layers = sparse_bridge.report().layers
    assert {"SubMConv3d"} <= set(layers["spconv"]) and "MinkowskiConvolution" in layers["minkowski"]


@pytest.mark.parametrize("stride, cell", [(1 << 20, 4096), (3, 1 << 30), (2, -(1 << 30) - 1), ((1 << 31) - 1, -2)])
@pytest.mark.parametrize("target", ["minkowski", "torchsparse 2.0"])
def test_coordinates_that_leave_int32_are_refused(frameworks, target, stride, cell):
    coords = torch.tensor([[0, 1, 0, 0], [0, cell, 0, 0]], dtype=torch.int32)
    data = SparseData(torch.ones(2, 1), coords, (stride, 1, 1))
    with in_release(target) as name, pytest.raises(CoordinateError, match=f"{stride * cell}, 0, 0.* leaves 32-bit"):
        sparse_bridge.convert(data, to=name)


@pytest.mark.parametrize("stride, cell", [(1 << 20, 2047), (2, -(1 << 30)), ((1 << 31) - 1, -1)])
@pytest.mark.parametrize("target", ["minkowski", "torchsparse 2.0"])
def test_coordinates_at_the_ends_of_int32_are_exact(frameworks, target, stride, cell):
    coords = torch.tensor([[0, 1, 0, 0], [0, cell, 5, 0]], dtype=torch.int32)
    data = SparseData(torch.ones(2, 1), coords, (stride, 1, 1))
    with in_release(target) as name:
        x = sparse_bridge.convert(data, to=name)
        sites = x.C if name == "minkowski" else x.coords[:, [3, 0, 1, 2]]
        assert sites.tolist() == [[0, stride, 0, 0], [0, cell * stride, 5, 0]] and sites.dtype == torch.int32
        assert torch.equal(sparse_bridge.convert(x, to="core").coords, coords)


@pytest.mark.parametrize("target", ["minkowski", "torchsparse 2.0"])
def test_tensor_strides_that_leave_int32_are_refused(frameworks, target):
    feats, coords = scene()
    with in_release(target) as name, pytest.raises(OverflowLimitError, match=f"tensor stride .*{1 << 32}"):
        sparse_bridge.convert(SparseData(feats, coords, (1 << 32, 1, 1)), to=name)


def test_no_map_is_joined_whose_coordinates_only_wrap_to_the_same(frameworks):
    ME = frameworks["minkowski"]
    like = ME.SparseTensor(torch.ones(1, 1), torch.tensor([[0, -(1 << 31), 0, 0]]).int(), tensor_stride=2)
    data = SparseData(torch.ones(1, 1), torch.tensor([[0, 1 << 30, 0, 0]]).int(), (2, 2, 2))
    with pytest.raises(CoordinateError, match="leaves 32-bit"):
        sparse_bridge.convert(data, to="minkowski", like=like)
    data = SparseData(torch.ones(1, 1), torch.tensor([[0, -(1 << 30), 0, 0]]).int(), (2, 2, 2))
    assert sparse_bridge.convert(data, to="minkowski", like=like).coordinate_map_key == like.coordinate_map_key


BAD = [
    (SettingError, "to='dense'", lambda f, x: sparse_bridge.convert(x, to="dense")),
    (DataTypeError, "no sparse tensor", lambda f, x: sparse_bridge.convert(x.F, to="spconv")),
    (
        CoordinateError,
        "share a coordinate",
        lambda f, x: sparse_bridge.convert(SparseData(x.F, torch.zeros_like(x.C), (1, 1, 1)), to="minkowski"),
    ),
    (
        CoordinateError,
        "no multiples|not multiples",
        lambda f, x: sparse_bridge.convert(f["minkowski"].SparseTensor(x.F, x.C, tensor_stride=2), to="spconv"),
    ),
    (
        CoordinateError,
        "negative|start at 0|goes down",
        lambda f, x: sparse_bridge.convert(
            f["minkowski"].SparseTensor(x.F, x.C - torch.tensor([0, 3, 3, 3]).int()), to="spconv"
        ),
    ),
    (
        GeometryError,
        "axes",
        lambda f, x: sparse_bridge.convert(SparseData(x.F, x.C[:, :3].contiguous(), (1, 1)), to="minkowski", like=x),
    ),
    (ShapeError, "equal N", lambda f, x: SparseData(x.F[1:], x.C, (1, 1, 1))),
    (DataTypeError, "int32", lambda f, x: SparseData(x.F, x.C.long(), (1, 1, 1))),
    (GeometryError, "tensor_stride", lambda f, x: SparseData(x.F, x.C, (1, 1))),
    (CoordinateError, "batch_size", lambda f, x: SparseData(x.F, x.C, (1, 1, 1), None, -1)),
    (DeviceError, "meta", lambda f, x: SparseData(x.F.to("meta"), x.C, (1, 1, 1))),
]


@pytest.mark.parametrize(("kind", "text", "call"), BAD)
def test_what_cannot_be_converted(frameworks, kind, text, call):
    feats, coords = scene()
    x = frameworks["minkowski"].SparseTensor(feats, coords)
    with pytest.raises(kind, match=text) as caught:
        call(frameworks, x)
    assert isinstance(caught.value, SparseBridgeError)


@pytest.mark.parametrize("target", ["core", "spconv", "torchsparse", "flex_gemm"])
@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        ({"batch_size": 2}, "a batch index is 2; expected 0 <= c < 2"),
        ({"batch_size": 3, "spatial_shape": [7, 5, 5]}, "along axis 1 is 5; expected 0 <= c < 5"),
        ({"spatial_shape": [7, 6, 4]}, "along axis 2 is 4; expected 0 <= c < 4"),
    ],
)
def test_bounds_that_do_not_hold_the_rows(frameworks, target, bounds, said):
    with sparse_bridge.enable("flex_gemm"), pytest.raises(CoordinateError, match=said):
        sparse_bridge.convert(make(frameworks, "torchsparse", *scene()), to=target, **bounds)


def test_a_like_that_does_not_hold_the_rows(frameworks):
    feats, coords = scene()
    inside = coords[:, 1] < 6
    like = frameworks["spconv"].SparseConvTensor(feats[inside], coords[inside], [6, 6, 5], 3)
    x = make(frameworks, "torchsparse", feats, coords)
    with pytest.raises(CoordinateError, match="along axis 0 is 6; expected 0 <= c < 6"):
        sparse_bridge.convert(x, to="spconv", like=like)
    assert sparse_bridge.convert(x, to="spconv", like=like, spatial_shape=[9, 9, 9]).spatial_shape == [9, 9, 9]


@pytest.mark.parametrize("name", [*NAMES, "flex_gemm"])
def test_from_core_takes_what_to_core_gives(frameworks, name):
    adapter = importlib.import_module(f"sparse_bridge.adapters.{name}")
    x = make(frameworks, "spconv", *scene())
    for other in (x, (x.features, x.indices), None):
        with pytest.raises(DataTypeError, match=f"from_core got {type(other).__name__}; expected a SparseData"):
            adapter.from_core(other)


def test_a_target_that_is_not_there():
    sparse_bridge.disable()
    feats, coords = scene()
    with pytest.raises(LifecycleError, match="enable"):
        sparse_bridge.convert(SparseData(feats, coords, (1, 1, 1)), to="minkowski")
    assert converting.framework_of(feats) is None


@pytest.mark.gpu
@pytest.mark.parametrize("target", NAMES)
def test_on_the_gpu(frameworks, target):
    feats, coords = scene()
    leaf = feats.detach().cuda().requires_grad_()
    x = frameworks["minkowski"].SparseTensor(leaf, coords.cuda())
    y = sparse_bridge.convert(x, to=target)
    got, sites = rows(y, target)
    assert got.is_cuda and sites.is_cuda and torch.equal(got, leaf)
    got.sum().backward()
    assert torch.equal(leaf.grad, torch.ones_like(leaf))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"like": 3}, "like is int; expected a sparse tensor of spconv"),
        ({"like": torch.ones(3)}, "like is Tensor; expected"),
        ({"like": SparseData(torch.ones(1, 1), torch.zeros(1, 4).int(), (1, 1, 1))}, "like is SparseData; expected"),
        ({"tensor_stride": 2}, "tensor_stride is 2; expected one number for each axis"),
        ({"spatial_shape": 8}, "spatial_shape is 8; expected one number for each axis"),
        ({"batch_size": "1"}, "batch_size is '1'; expected a whole number"),
    ],
)
def test_arguments_of_another_kind_are_refused_by_name(frameworks, options, said):
    data = SparseData(torch.ones(1, 1), torch.zeros(1, 4).int(), (1, 1, 1))
    with pytest.raises(DataTypeError, match=said):
        sparse_bridge.convert(data, to="spconv", **options)
