"""The functional layer: `spconv.pytorch.ops` and `.functional` on pair tensors and tables."""

from __future__ import annotations

import pytest
import torch

from . import apis

KINDS = {
    "submanifold": {"ksize": [3, 3, 3], "subm": True},
    "strided": {"ksize": [3, 2, 3], "stride": [2, 1, 2], "padding": [1, 0, 1]},
    "transposed": {"ksize": [2, 3, 2], "stride": [2, 2, 1], "transpose": True},
    "large": {"ksize": [5, 3, 3], "subm": True},
}


def geometry(kind):
    options = {"stride": [1] * 3, "padding": [0] * 3, "dilation": [1] * 3, "out_padding": [0] * 3}
    return {**options, **KINDS[kind]}


def layer_of(sp, kind):
    """The module whose map `get_indice_pairs` builds, 4 to 6 channels, no bias."""
    g = geometry(kind)
    name = "SubMConv3d" if g.get("subm") else "SparseConv3d"
    name = "SparseConvTranspose3d" if g.get("transpose") else name
    rule = g["ksize"], g["stride"], g["padding"]
    return getattr(sp, name)(4, 6, *rule, bias=False, algo=sp.ConvAlgo.Native)


def gradients(function, *leaves):
    y = function(*leaves)
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
    return y, torch.autograd.grad(y, leaves, weight)


@pytest.mark.parametrize("kind", KINDS)
def test_convolution_from_pair_lists_and_tables(standin, kind):
    sp, g = standin, geometry(kind)
    x = apis.tensor(sp, dtype=torch.float64)
    layer = layer_of(sp, kind).double()
    features, weight = x.features.requires_grad_(), layer.weight
    by_layer = layer(x)
    wanted, want = gradients(lambda f, w: layer(x.replace_feature(f)).features, features, weight)
    place = [x.indices, 2, [7, 8, 9], sp.ConvAlgo.Native]
    out, pairs, counts = sp.ops.get_indice_pairs(*place, **g)
    assert torch.equal(out, by_layer.indices) and pairs.shape[0] == 2
    subm, n_out = bool(g.get("subm")), len(out)
    entry = sp.functional.indice_subm_conv if subm else sp.functional.indice_conv
    y, got = gradients(lambda f, w: entry(f, w, pairs, counts, n_out, sp.ConvAlgo.Native, None), features, weight)
    torch.testing.assert_close((y, *got), (wanted, *want))
    assert torch.equal(sp.ops.indice_conv(features, weight, pairs, counts, n_out, subm=subm), y)
    dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
    raw = sp.ops.indice_conv_backward(features, weight, dy, pairs, counts, subm=subm)
    torch.testing.assert_close(raw, want)
    tables = sp.ops.get_indice_pairs_implicit_gemm(*place, **g)
    out, per_offset, fwd, bwd, masks_fwd, masks_bwd, order_fwd, order_bwd, masks = tables
    assert torch.equal(out, by_layer.indices) and fwd.shape[1] == n_out and bwd.shape[1] == 60
    assert torch.equal((fwd >= 0).sum(1).int(), per_offset)
    y, got = gradients(
        lambda f, w: sp.functional.implicit_gemm(
            f, w, fwd, bwd, masks_fwd, masks_bwd, order_fwd, order_bwd, n_out, masks, True, subm, None
        ),
        features,
        weight,
    )
    torch.testing.assert_close((y, *got), (wanted, *want))
    raw = sp.ops.implicit_gemm_backward(
        features, weight, dy, fwd, bwd, masks_fwd, masks_bwd, order_fwd, order_bwd, None, masks, -1, subm
    )
    torch.testing.assert_close(raw, want)


@pytest.mark.parametrize("kind", KINDS)
def test_tables_agree_with_pair_lists_and_masks(standin, kind):
    sp, g = standin, geometry(kind)
    x = apis.tensor(sp)
    place = [x.indices, 2, [7, 8, 9], sp.ConvAlgo.MaskImplicitGemm]
    _, pairs, _ = sp.ops.get_indice_pairs(*place, **g)
    _, _, fwd, bwd, masks_fwd, _, order_fwd, _, _ = sp.ops.get_indice_pairs_implicit_gemm(*place, **g)
    for v in range(fwd.shape[0]):
        valid = pairs[0, v] >= 0
        ins, outs = pairs[0, v][valid].long(), pairs[1, v][valid].long()
        assert torch.equal(fwd[v, outs].long(), ins) and int((fwd[v] >= 0).sum()) == len(ins)
        assert torch.equal(bwd[v, ins].long(), outs) and int((bwd[v] >= 0).sum()) == len(ins)
        bit = masks_fwd[0][:, v // 32].long() >> (v % 32) & 1
        assert torch.equal(bit.bool(), fwd[v] >= 0)
    assert torch.equal(order_fwd[0].sort().values, torch.arange(fwd.shape[1]).int())


def test_inverse_from_pair_lists(standin):
    sp = standin
    x = apis.tensor(sp)
    down = sp.SparseConv3d(4, 6, 3, 2, 1, indice_key="d", algo=sp.ConvAlgo.Native)
    up = sp.SparseInverseConv3d(6, 4, 3, "d", bias=False, algo=sp.ConvAlgo.Native)
    y = down(x)
    record = y.indice_dict["d"]
    got = sp.functional.indice_inverse_conv(
        y.features, up.weight, record.indice_pairs, record.indice_pair_num, 60, sp.ConvAlgo.Native, None
    )
    torch.testing.assert_close(got, up(y).features)
    also = sp.ops.indice_conv(y.features, up.weight, record.indice_pairs, record.indice_pair_num, 60, inverse=True)
    assert torch.equal(also, got)


def test_bias_and_activations(standin):
    from cumm import tensorview as tv

    sp, g = standin, geometry("submanifold")
    x = apis.tensor(sp)
    layer = sp.SubMConv3d(4, 6, 3)
    want = layer(x).features
    _, pairs, counts = sp.ops.get_indice_pairs(x.indices, 2, [7, 8, 9], None, **g)
    acts = tv.gemm.Activation
    for act, function in (
        (acts.None_, lambda v: v),
        (acts.ReLU, torch.relu),
        (acts.Sigmoid, torch.sigmoid),
        (acts.LeakyReLU, lambda v: torch.nn.functional.leaky_relu(v, 0.3)),
    ):
        with torch.no_grad():
            got = sp.ops.indice_conv(
                x.features, layer.weight, pairs, counts, 60, subm=True, bias=layer.bias, act_alpha=0.3, act_type=act
            )
        torch.testing.assert_close(got, function(want))


@pytest.mark.parametrize("mode", ["max", "average"])
def test_pools(standin, mode):
    sp = standin
    x = apis.tensor(sp, dtype=torch.float64)
    features = x.features.requires_grad_()
    pool = (sp.SparseMaxPool3d if mode == "max" else sp.SparseAvgPool3d)(2, 2, indice_key="p")
    wanted, want = gradients(lambda f: pool(x.replace_feature(f)).features, features)
    g = {**geometry("strided"), "ksize": [2] * 3, "stride": [2] * 3, "padding": [0] * 3}
    out, pairs, counts = sp.ops.get_indice_pairs(x.indices, 2, [7, 8, 9], None, **g)
    tables = sp.ops.get_indice_pairs_implicit_gemm(x.indices, 2, [7, 8, 9], None, **g)
    fwd, bwd, n_out = tables[2], tables[3], len(out)
    dy = torch.linspace(-1, 1, wanted.numel(), dtype=wanted.dtype).reshape(wanted.shape)
    if mode == "max":
        runs = [
            lambda f: sp.functional.indice_maxpool(f, pairs, counts, n_out),
            lambda f: sp.functional.indice_maxpool_implicit_gemm(f, fwd, bwd, n_out),
        ]
        raw = [
            sp.ops.indice_maxpool_backward(features, wanted, dy, pairs, counts),
            sp.ops.indice_maxpool_implicit_gemm_backward(features, wanted, dy, bwd),
        ]
        assert torch.equal(sp.ops.indice_maxpool(features, pairs, counts, n_out), wanted)
        assert torch.equal(sp.ops.indice_maxpool_implicit_gemm(features, fwd, n_out), wanted)
    else:
        runs = [lambda f: sp.functional.indice_avgpool_implicit_gemm(f, fwd, bwd, n_out, True)]
        y, count = sp.ops.indice_avgpool_implicit_gemm(features, fwd, n_out, True)
        assert torch.equal(y, wanted) and torch.equal(count, (fwd >= 0).sum(0).int())
        raw = [sp.ops.indice_avgpool_implicit_gemm_backward(dy, bwd, count)]
    for run in runs:
        y, got = gradients(run, features)
        torch.testing.assert_close((y, *got), (wanted, *want))
    for gradient in raw:
        torch.testing.assert_close(gradient, want[0])


def test_small_operations(standin):
    sp = standin
    counter = torch.tensor([3, 9], dtype=torch.int32)
    assert sp.ops.maximum_value_int_(counter, 5) is counter and counter.tolist() == [5, 9]
    coordinates = torch.tensor([[1, 0], [0, 2], [-1, 3], [1, 4], [2, 5]], dtype=torch.int32)
    rows, counts = sp.ops.global_pool_rearrange(coordinates, 2)
    assert counts.tolist() == [1, 2] and rows.shape == (2, 5)
    assert rows[0].tolist() == [1, -1, -1, -1, -1] and rows[1].tolist() == [0, 3, -1, -1, -1]
    assert sp.ops.get_conv_output_size([9, 7], [3, -1], [2, 1], [1, 0], [1, 1]) == [5, 1]
    assert sp.ops.get_deconv_output_size([5], [3], [2], [1], [4], [1]) == [10]
    written = sp.core.scatter_nd(torch.tensor([[0, 1], [2, 0]]), torch.tensor([[1.0], [2.0]]), [3, 2, 1])
    assert written.flatten().tolist() == [0, 1, 0, 0, 2, 0]
    assert sp.core.expand_nd(3, True) == [1, 1, 1]
    scratch = sp.core.ThrustSortAllocator(torch.device("cpu"))
    assert scratch.alloc(10) == scratch.alloc(8) != 0


def test_upright_suppression_of_the_first_generation(standin):
    boxes = torch.tensor([[0, 0, 9, 9], [0, 0, 9, 8], [20, 20, 29, 29.0], [40, 40, 49, 49]])
    scores = torch.tensor([0.5, 0.9, 0.4, 0.3])
    nms = standin.ops.nms
    assert nms(boxes, scores, -1, -1, 0.5, 1.0).tolist() == [1, 2, 3]
    assert nms(boxes, scores, 3, -1, 0.5, 1.0).tolist() == [1, 2]
    assert nms(boxes, scores, -1, 1, 0.5, 1.0).tolist() == [1]
    import spconv

    assert spconv.ops.nms is nms


def test_one_pair_tensor_serves_many_calls_until_it_changes(standin):
    sp, g = standin, geometry("strided")
    x = apis.tensor(sp)
    out, pairs, counts = sp.ops.get_indice_pairs(x.indices, 2, [7, 8, 9], None, **g)
    weight = torch.randn(6, *g["ksize"], 4)
    first = sp.ops.indice_conv(x.features, weight, pairs, counts, len(out))
    assert torch.equal(sp.ops.indice_conv(x.features, weight, pairs, counts, len(out)), first)
    counts.zero_()
    pairs.fill_(-1)
    assert not sp.ops.indice_conv(x.features, weight, pairs, counts, len(out)).any()
