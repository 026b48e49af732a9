"""The table of docs/spconv.md that says what differs from spconv, in both modes."""

from __future__ import annotations

import math
import sys
import warnings

import pytest
import torch
from torch import nn

from sparse_bridge.errors import GeometryError
from tests.adapters.differences import Differences

from . import apis

TABLE = Differences("spconv.md", "| Here | spconv 2.3.8 | Why |")
STANDIN = "(stand-in)"


@pytest.mark.parametrize("row", TABLE.rows)
def test_a_row(row):
    for name in ["standin"] if row.endswith(STANDIN) else apis.APIS:
        with apis.APIS[name]() as sp:
            torch.manual_seed(0)
            TABLE.of(row)(sp)


def test_every_row_is_run():
    TABLE.assert_complete()


def is_standin(sp):
    return hasattr(sp.SparseConvTensor, "_switches")


def empty(sp, channels=4):
    return sp.SparseConvTensor(torch.ones(0, channels), torch.ones(0, 4).int(), [8] * 3, 2)


def tensor(sp, rows, shape=(4, 4, 4), values=None, batch_size=1):
    rows = torch.tensor(rows, dtype=torch.int32)
    values = torch.ones(len(rows), 1) if values is None else torch.tensor(values)
    return sp.SparseConvTensor(values, rows, list(shape), batch_size)


def ones(layer):
    nn.init.ones_(layer.weight)
    return layer


@TABLE.row("CPU layers take a bias in inference")
def _(sp):
    x = apis.tensor(sp)
    for layer in (sp.SubMConv3d(4, 6, 3), sp.SparseConv3d(4, 6, 2, 2)):
        y = layer.eval()(x.replace_feature(x.features.requires_grad_()))
        y.features.sum().backward()
        assert torch.equal(layer.bias.grad, torch.full((6,), float(len(y.features))))
        assert layer.weight.grad.abs().sum() > 0


@TABLE.row("`eval()` keeps the autograd graph")
def _(sp):
    layer = sp.SubMConv3d(4, 6, 3, bias=False).eval()
    assert layer(apis.tensor(sp)).features.requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(apis.tensor(sp)).features.dtype == torch.bfloat16


@TABLE.row("autocast gives the dtype that was asked for")
def _(sp):
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert sp.SparseConv3d(4, 6, 2, 2)(apis.tensor(sp)).features.dtype == dtype


@TABLE.row("bf16 everywhere, fp64 on GPU")
def _(sp):
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for device in devices:
        for dtype in (torch.bfloat16, torch.float64):
            x = apis.tensor(sp, dtype=dtype)
            x.indices = x.indices.to(device)
            x = x.replace_feature(x.features.to(device))
            for layer in (sp.SubMConv3d(4, 6, 3), sp.SparseConvTranspose3d(4, 6, 2, 2)):
                assert layer.to(device, dtype)(x).features.dtype == dtype
            assert sp.SparseMaxPool3d(2, 2)(x).features.dtype == dtype


@TABLE.row("fp16 and bf16 accumulate in fp32")
def _(sp):
    for dtype in (torch.float16, torch.bfloat16):
        x = sp.SparseConvTensor(torch.ones(1, 4096, dtype=dtype), torch.zeros(1, 4).int(), [4] * 3, 1)
        y = ones(sp.SubMConv3d(4096, 1, 3, bias=False)).to(dtype)(x)
        assert float(y.features.detach()) == 4096, "in fp16 the sum stops at 2048, in bf16 at 256"


@TABLE.row("no rows: every layer returns no rows")
def _(sp):
    x = empty(sp)
    for layer, channels in (
        (sp.SubMConv3d(4, 6, 3), 6),
        (sp.SubMConv3d(4, 6, 1), 6),
        (sp.SparseConv3d(4, 6, 2, 2), 6),
        (sp.SparseConvTranspose3d(4, 6, 2, 2), 6),
        (sp.SparseMaxPool3d(2, 2), 4),
        (sp.SparseAvgPool3d(2, 2), 4),
    ):
        y = layer(x)
        assert y.features.shape == (0, channels) and y.indices.shape == (0, 4)
    assert sp.SparseGlobalMaxPool()(x).shape == (2, 4)


@TABLE.row("outputs that vanish give no rows")
def _(sp):
    x = tensor(sp, [[0, 3, 3, 3]])  # no window of this layer reaches the last cell
    for layer in (sp.SparseConv3d(1, 2, 1, 2), sp.SparseMaxPool3d(1, 2)):
        y = layer(x)
        assert len(y.features) == len(y.indices) == 0 and y.spatial_shape == [2, 2, 2]


@TABLE.row("[rows](#row-order) that spconv leaves in any order")
def _(sp):
    if not is_standin(sp):
        return  # on a CPU the wheel leaves none: see test_row_order
    x = tensor(sp, [[0, 3, 3, 3], [0, 0, 0, 0], [0, 3, 2, 3], [0, 0, 3, 0]])
    y = sp.SparseConv3d(1, 1, 2, 2)(x)
    assert y.indices.tolist() == [[0, 1, 1, 1], [0, 0, 0, 0], [0, 0, 1, 0]]


@TABLE.row("results are [equal to the bit]")
def _(sp):
    layer, x = sp.SparseConv3d(4, 16, 3, 2, 1), apis.tensor(sp)
    results = []
    for _ in range(3):
        layer.zero_grad()
        y = layer(apis.tensor(sp))
        y.features.square().sum().backward()
        results.append((y.features, y.indices, layer.weight.grad.clone()))
    for again in results[1:]:
        assert all(map(torch.equal, again, results[0]))
    assert len(x.indices) == 60


@TABLE.row("duplicate coordinates: submanifold neighbours see the first row")
def _(sp):
    x = tensor(sp, [[0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 2]], values=[[1.0], [10.0], [100.0]])
    same = ones(sp.SubMConv3d(1, 1, 3, bias=False))(x).features[:, 0].tolist()
    assert same[2] == 101.0, "a neighbour sees the first one"
    assert ones(sp.SparseConv3d(1, 1, 4, 4, bias=False))(x).features.tolist() == [[111.0]]


@TABLE.row("rows outside grid or batch have no neighbours")
def _(sp):
    x = tensor(sp, [[0, 1, 1, 1], [0, 1, 1, 4], [1, 1, 1, 2], [-1, 1, 1, 2]], (4, 4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # see test_outside
        assert ones(sp.SubMConv3d(1, 1, 3, bias=False))(x).features.flatten().tolist() == [1.0] * 4
        assert len(sp.SparseConv3d(1, 1, 3, 1, 1)(x).indices) == 27


@TABLE.row("grids up to 2^62 cells")
def _(sp):
    far = (1 << 20) - 2
    near = tensor(sp, [[0, 0, 0, 0], [0, 0, 0, 1], [1, 1, 1, 1]], (2, 2, 2), batch_size=2)
    away = tensor(
        sp, [[0, far, far, far], [0, far, far, far + 1], [1, far + 1, far + 1, far + 1]], (1 << 20,) * 3, batch_size=3
    )
    for layer in (sp.SubMConv3d(1, 3, 3), sp.SparseConv3d(1, 3, 2, 2)):
        y, z = layer(near), layer(away)
        torch.testing.assert_close(y.features, z.features)


@TABLE.row("average pools on the CPU")
def _(sp):
    x = tensor(sp, [[0, 0, 0, 0], [0, 3, 3, 3], [0, 1, 1, 1]], values=[[3.0], [6.0], [0.0]])
    x = x.replace_feature(x.features.requires_grad_())
    pool = sp.SparseAvgPool3d([4, 4, 4], 4)
    assert pool.kernel_size == [4, 4, 4]
    y = pool(x).features
    y.sum().backward()
    assert y.tolist() == [[3.0]]
    torch.testing.assert_close(x.features.grad, torch.full((3, 1), 1 / 3))
    assert sp.SparseAvgPool2d((7, 7), None).stride == [7, 7]


@TABLE.row("a NaN in the window of a max pool")
def _(sp):
    for values in ([[math.nan], [1.0]], [[1.0], [math.nan]], [[math.nan], [math.nan]]):
        x = tensor(sp, [[0, 0, 0, 0], [0, 1, 1, 1]], values=values)
        for pool in (sp.SparseMaxPool3d(4, 4), sp.SparseGlobalMaxPool()):
            y = pool(x)
            assert math.isnan(getattr(y, "features", y).item())


@TABLE.row("`SparseGlobalAvgPool` returns")
def _(sp):
    x = apis.tensor(sp)
    want = torch.stack([x.features[x.indices[:, 0] == b].mean(0) for b in (0, 1)])
    torch.testing.assert_close(sp.SparseGlobalAvgPool()(x), want)


@TABLE.row("global pools: items without rows give zeros")
def _(sp):
    x = tensor(sp, [[1, 0, 0, 0]], values=[[-2.0]], batch_size=3)
    for pool in (sp.SparseGlobalMaxPool(), sp.SparseGlobalAvgPool()):
        assert pool(x).tolist() == [[0.0], [-2.0], [0.0]]


@TABLE.row("`add_input=` is added")
def _(sp):
    x = apis.tensor(sp)
    more = x.replace_feature(torch.ones(60, 6))
    for layer in (sp.SubMConv3d(4, 6, 1), sp.SparseConv3d(4, 6, 1)):
        torch.testing.assert_close(layer(x, more).features, layer(x).features + 1)


@TABLE.row("`x.features = f` assigns")
def _(sp):
    x = apis.tensor(sp)
    x.features = x.features * 2
    torch.testing.assert_close(x.features, 2 * apis.tensor(sp).features)


@TABLE.row("`x += y`, `select_by_index` work")
def _(sp):
    x = sp.SubMConv3d(4, 4, 3, indice_key="a")(apis.tensor(sp))
    copy, kept, before = x.shadow_copy(), x, x.features.clone()
    x += x.replace_feature(torch.ones_like(before))
    assert x is kept and torch.equal(x.features, before + 1) and torch.equal(copy.features, before)
    x += torch.ones_like(before)
    torch.testing.assert_close(x.features, before + 2)
    assert torch.equal(copy.features, before)
    y = x.select_by_index(torch.tensor([3, 1]))
    assert torch.equal(y.indices, x.indices[[3, 1]]) and torch.equal(y.features, x.features[[3, 1]])
    assert list(x.indice_dict) == ["a"] and not y.indice_dict and list(copy.indice_dict) == ["a"]


@TABLE.row("`sparse_add` keeps kernel maps usable")
def _(sp):
    x = apis.tensor(sp)
    up = sp.SparseInverseConv3d(4, 4, 3, "d", bias=False)
    y = sp.SparseConv3d(4, 4, 3, 2, 1, indice_key="d", bias=False)(x)
    want = apis.by_site(up(y.replace_feature(2 * y.features)))
    got = apis.by_site(up(sp.functional.sparse_add(y, y)))
    assert want.keys() == got.keys()
    for site, row in want.items():
        torch.testing.assert_close(got[site], row)


@TABLE.row("weights of older layouts are converted once")
def _(sp):
    import spconv.constants

    before = spconv.constants.SAVED_WEIGHT_LAYOUT
    layer, older = sp.SubMConv3d(4, 6, 3, bias=False), torch.randn(3, 3, 3, 4, 6)
    try:
        spconv.constants.SAVED_WEIGHT_LAYOUT = "RSCK"
        layer.load_state_dict({"weight": older.clone()})
    finally:
        spconv.constants.SAVED_WEIGHT_LAYOUT = before
    assert torch.equal(layer.weight, older.permute(4, 0, 1, 2, 3))


POINTS = [[0.5, 0.5, 0.5], [3.1, 3.2, 3.3], [0.1, 0.2, 0.3], [2.5, 0.5, 0.5], [0.9, 0.9, 0.9]]


def voxelizer(sp, n_voxels=8, n_points=3, grid=(1, 1, 1, 0, 0, 0, 4, 4, 4)):
    from spconv.pytorch.utils import PointToVoxel

    return PointToVoxel(list(grid[:3]), list(grid[3:]), 3, n_voxels, n_points)


@TABLE.row("`empty_mean` of the voxelizers")
def _(sp):
    from cumm import tensorview as tv
    from spconv.utils import Point2VoxelCPU3d

    points = torch.tensor(POINTS)
    want = points[[1, 1, 1]]
    voxels, _, counts = voxelizer(sp)(points, empty_mean=True)
    assert counts.tolist() == [3, 1, 1] and torch.equal(voxels[1], want)
    voxels, _, _, ids = voxelizer(sp).generate_voxel_with_id(points, empty_mean=True)
    assert torch.equal(voxels[1], want) and ids.tolist() == [0, 1, 0, 2, 0]
    compiled = Point2VoxelCPU3d([1] * 3, [0, 0, 0, 4, 4, 4], 3, 8, 3)
    made = compiled.point_to_voxel_empty_mean(tv.from_numpy(points.numpy()))
    assert torch.equal(torch.from_numpy(made[0].numpy())[1], want)


@TABLE.row("`PointToVoxel` keeps the first points and voxels")
def _(sp):
    points = torch.tensor(POINTS)
    voxels, cells, counts = voxelizer(sp, 2, 2)(points)
    assert cells.tolist() == [[0, 0, 0], [3, 3, 3]] and counts.tolist() == [2, 1]
    assert torch.equal(voxels[0], points[[0, 2]])


@TABLE.row("voxel grids without cells")
def _(sp):
    from spconv.utils import Point2VoxelCPU3d

    for size, high in ((-1, 4), (1e-9, 1e6), (1, 0), (0, 1), (float("nan"), 1)):
        for make in (
            lambda s, h: voxelizer(sp, grid=(s, s, s, 0, 0, 0, h, h, h)),
            lambda s, h: Point2VoxelCPU3d([s] * 3, [0, 0, 0, h, h, h], 3, 8, 3),
        ):
            with pytest.raises(GeometryError, match="cells"):
                make(size, high)


@TABLE.row("a pool and its inverse layer agree")
def _(sp):
    x = apis.tensor(sp)
    for size in (4, (3, 4, 5)):
        y = sp.SparseMaxPool3d(size, 2, indice_key="p")(x)
        back = sp.SparseInverseConv3d(4, 2, size, "p")(y)
        assert torch.equal(back.indices, x.indices)


@TABLE.row("`dense()` names the row")
def _(sp):
    x = tensor(sp, [[0, 1, 1, 1], [0, 1, 7, 1]])
    with pytest.raises(IndexError, match="row 1 has axis 1 7, but the grid holds 4"):
        x.dense()
    assert tensor(sp, [[0, 1, 1, 1]]).dense(channels_first=False).shape == (1, 4, 4, 4, 1)


@TABLE.row("`algo` is remembered and checked per key")
def _(sp):
    x = sp.SubMConv3d(4, 4, 3, indice_key="k", algo=sp.ConvAlgo.Native)(apis.tensor(sp))
    other = sp.SubMConv3d(4, 4, 3, indice_key="k", algo=sp.ConvAlgo.Native)
    want = other(x).features
    other.algo = sp.ConvAlgo.MaskImplicitGemm
    if not sys.modules["spconv.cppconstants"].CPU_ONLY_BUILD:  # which leaves layers no choice
        with pytest.raises(AssertionError, match="same algo"):
            other(x)
        other.indice_key = None
    torch.testing.assert_close(other(x).features, want)


@TABLE.row("`CPU_ONLY_BUILD` is False")
def _(sp):
    from spconv import cppconstants

    assert cppconstants.CPU_ONLY_BUILD is False and cppconstants.HAS_BOOST is True
