"""What spconv lacks and its users ask for; against float64 references."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sparse_bridge import errors, settings
from tests import checks

from . import apis


def dense_answer(x, layer, features, weight, bias):
    """Channels-last output of a submanifold or strided layer by torch's dense convolution."""
    shape = (int(x.batch_size), *x.spatial_shape, features.shape[1])
    dense = features.new_zeros(shape).index_put(tuple(x.indices.long().t()), features)
    padding = [k // 2 for k in layer.kernel_size] if layer.subm else layer.padding
    stride = [1] * layer.ndim if layer.subm else layer.stride
    weight = weight.movedim(-1, 1)
    answer = F.conv3d(dense.movedim(-1, 1), weight, bias, stride, padding, groups=layer.groups)
    return answer.movedim(1, -1)


def check_layer(layer, x, dtype=torch.float32):
    """Forward and every gradient of `layer` on the CPU against float64."""
    leaf = x.features.detach().clone().requires_grad_()
    y = layer(x.replace_feature(leaf))
    exact = leaf.detach().double().requires_grad_()
    double = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}
    answer = dense_answer(x, layer, exact, **double)
    want = answer[tuple(y.indices.long().t())]
    checks.assert_close(y.features, want, dtype, "forward")
    gradient = torch.randn(want.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    y.features.backward(gradient.to(y.features.dtype))
    want.backward(gradient.double())
    checks.assert_close(leaf.grad, exact.grad, dtype, "input gradient")
    for name, parameter in layer.named_parameters():
        assert parameter.grad.dtype == parameter.dtype
        checks.assert_close(parameter.grad, double[name].grad, dtype, f"{name} gradient")
    return y


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["SubMConv3d", "SparseConv3d"])
def test_bias_on_the_cpu_in_training_and_inference(sp, kind, training):
    layer = getattr(sp, kind)(3, 5, 3).train(training)
    check_layer(layer, apis.tensor(sp, channels=3))
    with torch.no_grad():
        assert layer(apis.tensor(sp, channels=3)).features.isfinite().all()


def test_evaluation_keeps_the_graph(sp):
    layer = sp.SubMConv3d(4, 4, 3).eval()
    layer(apis.tensor(sp)).features.sum().backward()
    assert layer.weight.grad.abs().sum() > 0 and layer.bias.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", ["SubMConv3d", "SparseConv3d"])
def test_every_float_type(sp, kind, dtype):
    layer = getattr(sp, kind)(16, 17, 3, 1, 1).to(dtype)
    y = check_layer(layer, apis.tensor(sp, channels=16, rows=200, dtype=dtype), dtype)
    assert y.features.dtype == dtype


@pytest.mark.parametrize("kind", ["SubMConv3d", "SparseConv3d"])
@pytest.mark.parametrize(("c_in", "c_out", "groups"), [(4, 6, 2), (6, 6, 6), (3, 9, 3)])
def test_groups_on_request(standin, kind, c_in, c_out, groups):
    with settings.override(groups=True):
        layer = getattr(standin, kind)(c_in, c_out, 3, groups=groups)
        assert layer.weight.shape == (c_out, 3, 3, 3, c_in // groups)
        check_layer(layer, apis.tensor(standin, channels=c_in))


@pytest.mark.slow
def test_groups_by_the_environment():
    code = (
        "import sparse_bridge; sparse_bridge.enable('spconv', mode='standin')\n"
        "import spconv.pytorch as sp; print(sp.SubMConv3d(4, 4, 3, groups=2).groups)"
    )
    assert apis.python(code, SPARSE_BRIDGE_RULES="groups").split() == ["2"]


def every_layer(sp):
    return {
        "submanifold": sp.SubMConv3d(4, 5, 3, indice_key="s"),
        "strided": sp.SparseConv3d(4, 5, 3, 2, 1, indice_key="d"),
        "transposed": sp.SparseConvTranspose3d(4, 5, 2, 2),
        "unit": sp.SubMConv3d(4, 5, 1),
        "max pool": sp.SparseMaxPool3d(2),
        "average pool": sp.SparseAvgPool3d(2),
    }


@pytest.mark.parametrize("name", ["submanifold", "strided", "transposed", "unit", "max pool", "average pool"])
@pytest.mark.parametrize("training", [True, False])
def test_no_rows(standin, name, training):
    layer = every_layer(standin)[name].train(training)
    x = apis.tensor(standin, rows=0)
    leaf = x.features.requires_grad_()
    full = layer(apis.tensor(standin))
    y = layer(x.replace_feature(leaf))
    assert y.features.shape == (0, full.features.shape[1]) and y.indices.shape == (0, 4)
    assert y.indices.dtype == torch.int32 and y.spatial_shape == full.spatial_shape
    y.features.sum().backward()
    assert leaf.grad.shape == (0, 4)
    for parameter in layer.parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


def test_no_rows_through_a_u_net(sp):
    x = apis.tensor(sp, rows=0)
    down = sp.SparseConv3d(4, 8, 2, 2, indice_key="d")
    up = sp.SparseInverseConv3d(8, 4, 2, indice_key="d")
    y = up(sp.SubMConv3d(8, 8, 3)(down(x)))
    assert y.features.shape == (0, 4) and y.spatial_shape == [7, 8, 9]
    assert y.dense().shape == (2, 4, 7, 8, 9) and not y.dense().any()


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_batch_items_without_points(sp, empty):
    x = apis.tensor(sp, batch_size=3, rows=90)
    keep = x.indices[:, 0] != empty
    part = sp.SparseConvTensor(x.features[keep], x.indices[keep], x.spatial_shape, 3)
    net = sp.SparseSequential(sp.SubMConv3d(4, 4, 3), sp.SparseConv3d(4, 4, 3, 2, 1))
    whole, y = apis.by_site(net(x)), apis.by_site(net(part))
    assert y.keys() == {site for site in whole if site[0] != empty}
    for site, row in y.items():
        torch.testing.assert_close(row, whole[site], rtol=1e-5, atol=1e-6)
    maximum = sp.SparseGlobalMaxPool()(part)
    assert maximum.shape == (3, 4) and not maximum[empty].any()
    assert sp.SparseGlobalAvgPool()(part).shape == (3, 4)


def test_grids_beyond_32_bits(sp):
    """The same scene in a corner of a grid of 3.4e14 cells."""
    x = apis.tensor(sp)
    huge = [70_000, 70_001, 70_002]
    moved = x.indices + torch.tensor([0, 69_990, 69_990, 69_990], dtype=torch.int32)
    far = sp.SparseConvTensor(x.features, moved, huge, 2)
    net = sp.SparseSequential(
        sp.SubMConv3d(4, 4, 3, indice_key="s"),
        sp.SparseConv3d(4, 4, 3, 2, 1, indice_key="d"),
        sp.SparseInverseConv3d(4, 4, 3, indice_key="d"),
    )
    near = sp.SparseConvTensor(x.features, x.indices + moved.new_tensor([0, 4, 4, 4]), [20] * 3, 2)
    got, want = net(far), net(near)
    assert torch.equal(got.indices, moved)
    torch.testing.assert_close(got.features, want.features)
    assert net[1](far).spatial_shape == [35_000, 35_001, 35_001]


def windows(y, x, kernel, stride):
    """Rows of x in each window of y (no padding)."""
    rows = {tuple(site): row for row, site in enumerate(x.indices.tolist())}
    for site in y.indices.tolist():
        cells = torch.cartesian_prod(*[torch.arange(kernel)] * 3).tolist()
        places = [(site[0], *(c * stride + o for c, o in zip(site[1:], cell, strict=True))) for cell in cells]
        yield [rows[place] for place in places if place in rows]


def test_average_pools_divide_by_active_sites(standin):
    x = apis.tensor(standin, rows=200)
    leaf = x.features.double().requires_grad_()
    y = standin.SparseAvgPool3d(2)(x.replace_feature(leaf))
    want = torch.stack([leaf[rows].mean(0) for rows in windows(y, x, 2, 2)])
    torch.testing.assert_close(y.features, want)
    gradient = torch.randn_like(want)
    mine = torch.autograd.grad(y.features, leaf, gradient)[0]
    torch.testing.assert_close(mine, torch.autograd.grad(want, leaf, gradient)[0])


def test_average_pool_with_a_key_can_be_inverted(standin):
    x = apis.tensor(standin)
    y = standin.SparseAvgPool3d(2, indice_key="p")(x)
    z = standin.SparseInverseConv3d(4, 4, 2, indice_key="p")(y)
    assert z.indices is x.indices and z.features.shape == (60, 4)


def test_submanifold_pools(standin):
    x = apis.tensor(standin, rows=200)
    y = standin.pool.SparseMaxPool(3, 3, subm=True)(x)
    rows = apis.by_site(x)
    assert y.spatial_shape == x.spatial_shape and torch.equal(y.indices, x.indices)
    for site, row in apis.by_site(y).items():
        near = [
            r
            for other, r in rows.items()
            if other[0] == site[0] and all(abs(a - b) <= 1 for a, b in zip(other[1:], site[1:], strict=True))
        ]
        assert torch.equal(row, torch.stack(near).amax(0).clamp(min=0))


@pytest.mark.parametrize(("name", "reduce"), [("Max", "amax"), ("Avg", "mean")])
def test_global_pools(sp, name, reduce):
    x = apis.tensor(sp, dtype=torch.float64)
    x.features = x.features - 5  # a true maximum, not one clamped at 0
    x.indices[:7, 0] = -1
    leaf = x.features.requires_grad_()
    y = getattr(sp, f"SparseGlobal{name}Pool")()(x.replace_feature(leaf))
    items = [leaf[x.indices[:, 0] == item] for item in range(2)]
    want = torch.stack([getattr(item, reduce)(0) for item in items])
    torch.testing.assert_close(y, want)
    gradient = torch.randn_like(want)
    mine = torch.autograd.grad(y, leaf, gradient)[0]
    torch.testing.assert_close(mine, torch.autograd.grad(want, leaf, gradient)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["submanifold", "strided", "transposed", "unit"])
def test_autocast_gives_the_type_that_was_asked_for(sp, name, dtype):
    layer, x = every_layer(sp)[name], apis.tensor(sp)
    for training in (True, False):
        layer.train(training)
        with torch.autocast("cpu", dtype):
            y = layer(x)
        assert y.features.dtype == dtype
        want = layer(x).features
        checks.assert_close(y.features, want, dtype, name)
        y.features.float().sum().backward()
        assert layer.weight.grad.dtype == layer.bias.grad.dtype == torch.float32


def test_autocast_leaves_float64_alone(sp):
    layer = sp.SubMConv3d(4, 5, 3).double()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(apis.tensor(sp, dtype=torch.float64)).features.dtype == torch.float64


def test_deterministic_to_the_bit(sp):
    net = sp.SparseSequential(sp.SubMConv3d(4, 8, 3), sp.SparseConv3d(8, 8, 3, 2, 1))
    first, second = net(apis.tensor(sp)), net(apis.tensor(sp))
    assert torch.equal(first.indices, second.indices)
    assert torch.equal(first.features, second.features)


def test_select_by_index_and_in_place_addition(standin):
    x = standin.SubMConv3d(4, 4, 3, indice_key="s")(apis.tensor(standin))
    part = x.select_by_index(torch.arange(60) % 3 == 0)
    assert part.features.shape == (20, 4) and part.indices.shape == (20, 4)
    assert part.indice_dict == {} and list(x.indice_dict) == ["s"]
    before = x.features
    x += x
    assert torch.equal(x.features, 2 * before)
    assert torch.equal((before + x).features, (x + before).features)


def test_duplicates_can_be_removed(standin):
    x = apis.tensor(standin, rows=5)
    twice = x.replace_feature(torch.cat([x.features, -x.features]))
    twice.indices = torch.cat([x.indices, x.indices])
    once = standin.spatial.RemoveDuplicate()(twice)
    assert torch.equal(once.indices, x.indices) and torch.equal(once.features, x.features)


def test_a_torchscript_trace_is_refused(sp):
    """It would hold the map of this one input, whatever it is given later."""
    layer = sp.SubMConv3d(4, 8, 3).eval()
    indices = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 2]], dtype=torch.int32)

    def network(features, indices):
        return layer(sp.SparseConvTensor(features, indices, [8, 8, 8], 1)).features

    with pytest.warns(torch.jit.TracerWarning), pytest.raises(errors.UnsupportedError, match="Use torch"):
        torch.jit.trace(network, (torch.randn(2, 4), indices))


@pytest.mark.parametrize("kind", ["convolution", "pool"])
def test_a_trace_with_the_map_at_hand_is_refused(sp, kind):
    """The layer builds no map of its own, and the trace would hold the rows of the one that is there."""
    convolution = kind == "convolution"
    x = apis.tensor(sp, rows=6)
    channels = x.features.shape[1]
    first = sp.SubMConv3d(channels, channels, 3, indice_key="k") if convolution else sp.SparseMaxPool3d(2)
    second = sp.SubMConv3d(channels, channels, 3, indice_key="k") if convolution else first
    held = first(x)
    given = held.replace_feature(held.features.detach()) if convolution else x

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = second

        def forward(self, features):
            return self.layer(given.replace_feature(features)).features

    with pytest.warns(torch.jit.TracerWarning), pytest.raises(errors.UnsupportedError, match=r"torch\.jit\.trace"):
        torch.jit.trace(Network(), (given.features,), check_trace=False)
