"""Convolutions against loops in fp64, and what the original cannot do."""

from __future__ import annotations

import io
import itertools

import pytest
import torch

from sparse_bridge.adapters.flex_gemm.errors import ArgumentShapeError, ArgumentValueError
from sparse_bridge.errors import DataTypeError, SparseBridgeError, UnsupportedError

from .conftest import DEVICES

devices = pytest.mark.parametrize("device", DEVICES)


def voxels(n, channels, extents=(6, 7, 5), batch=2, dtype=torch.float64, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    cells = batch * extents[0] * extents[1] * extents[2]
    code = torch.randperm(cells, generator=generator)[:n]
    columns = []
    for extent in (*extents[::-1], batch):
        columns.append(code % extent)
        code = code // extent
    coords = torch.stack(columns[::-1], 1).int().contiguous()
    feats = torch.randn(n, channels, generator=generator, dtype=torch.float64).to(dtype)
    return feats.to(device), coords.to(device), torch.Size((batch, channels, *extents))


def weights(c_in, c_out, kernel, dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(7)
    shape = (c_out, *kernel, c_in)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def by_loop(feats, coords, weight, bias, out_coords, stride, origin, dilation, shape):
    """out[q] = bias + sum of W[t] feats at q * stride + t * dilation - origin, in fp64."""
    first = {}
    for row, site in enumerate(map(tuple, coords.tolist())):
        inside = all(0 <= c < s for c, s in zip(site[1:], shape[2:], strict=True))
        if inside and 0 <= site[0] < shape[0]:
            first.setdefault(site, row)
    out = torch.zeros(len(out_coords), weight.shape[0], dtype=torch.float64)
    offsets = list(itertools.product(*(range(k) for k in weight.shape[1:4])))
    for q, (b, *place) in enumerate(out_coords.tolist()):
        for t in offsets:
            site = tuple(c * s + i * d - o for c, s, i, d, o in zip(place, stride, t, dilation, origin, strict=True))
            row = first.get((b, *site))
            if row is not None:
                out[q] += weight[(slice(None), *t)].double() @ feats[row].double()
    return out if bias is None else out + bias.double()


@devices
@pytest.mark.parametrize("kernel", [(3, 3, 3), (1, 3, 5), (5, 5, 5), (1, 1, 1)])
def test_submanifold_with_every_gradient(flex_gemm, kernel, device):
    feats, coords, shape = voxels(90, 5, device=device)
    weight, bias = weights(5, 4, kernel, device=device), torch.randn(4).double().to(device)
    leaves = [one.requires_grad_() for one in (feats, weight, bias)]
    dilation = (1, 2, 1)
    origin = tuple(k // 2 * d for k, d in zip(kernel, dilation, strict=True))
    spconv = flex_gemm.ops.spconv
    out, cache = spconv.sparse_submanifold_conv3d(feats, coords, shape, weight, bias, None, dilation)
    cpu = [one.detach().cpu().requires_grad_() for one in leaves]
    want = by_loop(cpu[0], coords.cpu(), cpu[1], cpu[2], coords.cpu(), (1, 1, 1), origin, dilation, shape)
    torch.testing.assert_close(out.cpu(), want)
    grad = torch.randn(out.shape).double()
    got = torch.autograd.grad(out, leaves, grad.to(device))
    for one, other in zip(got, torch.autograd.grad(want, cpu, grad), strict=True):
        torch.testing.assert_close(one.cpu(), other)
    again, same = spconv.sparse_submanifold_conv3d(feats, None, None, weight, bias, cache, dilation)
    assert same is cache and torch.equal(again, out)


@devices
@pytest.mark.parametrize(
    "kernel, stride, padding",
    [
        ((3, 3, 3), (2, 2, 2), (1, 1, 1)),
        ((2, 2, 2), (2, 2, 2), (0, 0, 0)),
        ((2, 3, 1), (1, 2, 3), (0, 1, 0)),
        ((4, 4, 4), (2, 2, 2), (1, 1, 1)),
    ],
)
def test_strided_rows_ascend(flex_gemm, kernel, stride, padding, device):
    feats, coords, shape = voxels(70, 3, device=device)
    weight = weights(3, 6, kernel, device=device)
    out, places, _ = flex_gemm.ops.spconv.sparse_conv3d(feats, coords, shape, weight, None, None, None, stride, padding)
    found = [tuple(row) for row in places.tolist()]
    assert found == sorted(set(found))
    arguments = (stride, padding, (1, 1, 1), shape)
    want = by_loop(feats.cpu(), coords.cpu(), weight.cpu(), None, places.cpu(), *arguments)
    torch.testing.assert_close(out.cpu(), want)
    extents = [(s + 2 * p - k) // step + 1 for s, k, step, p in zip(shape[2:], kernel, stride, padding, strict=True)]
    every = torch.tensor([(b, *q) for b in range(2) for q in itertools.product(*map(range, extents))])
    ones = torch.ones_like(feats.cpu())
    touched = by_loop(ones, coords.cpu(), torch.ones_like(weight.cpu()), None, every, *arguments).abs().sum(1) > 0
    assert len(found) == int(touched.sum())


def test_given_outputs_may_repeat_and_lie_outside(flex_gemm):
    feats, coords, shape = voxels(40, 4)
    weight, bias = weights(4, 3, (3, 3, 3)), torch.randn(3).double()
    feats.requires_grad_()
    given = torch.cat([coords[:9], coords[:4], torch.tensor([[0, 50, -3, 0]])]).int()
    out, places, _ = flex_gemm.ops.spconv.sparse_conv3d(
        feats, coords, shape, weight, bias, None, given, padding=(1, 1, 1)
    )
    leaf = feats.detach().clone().requires_grad_()
    arguments = ((1, 1, 1), (1, 1, 1), (1, 1, 1), shape)
    want = by_loop(leaf, coords, weight, bias, given, *arguments)
    torch.testing.assert_close(out, want)
    assert places is not given and places.data_ptr() == given.data_ptr()
    grad = torch.randn(out.shape).double()
    (got,) = torch.autograd.grad(out, feats, grad)
    torch.testing.assert_close(got, torch.autograd.grad(want, leaf, grad)[0])


def test_equal_rows_and_rows_outside(flex_gemm):
    feats, coords, shape = voxels(30, 4)
    coords = torch.cat([coords, coords[:5], torch.tensor([[0, 0, 0, 5], [1, 6, 0, 0]])]).int()
    feats = torch.cat([feats, torch.randn(7, 4).double()])
    weight = weights(4, 4, (3, 3, 3))
    out, _ = flex_gemm.ops.spconv.sparse_submanifold_conv3d(feats, coords, shape, weight)
    arguments = ((1, 1, 1), (1, 1, 1), (1, 1, 1), shape)
    want = by_loop(feats, coords, weight, None, coords, *arguments)
    centre = weight[:, 1, 1, 1]
    want[30:35] += (feats[30:35] - feats[:5]) @ centre.t()  # every row meets itself
    want[35:] = feats[35:] @ centre.t()
    torch.testing.assert_close(out, want)
    strided, places, _ = flex_gemm.ops.spconv.sparse_conv3d(
        feats, coords, shape, weight, stride=(2, 2, 2), padding=(1, 1, 1)
    )
    arguments = ((2, 2, 2), (1, 1, 1), (1, 1, 1), shape)
    torch.testing.assert_close(strided, by_loop(feats, coords, weight, None, places, *arguments))


@devices
@pytest.mark.parametrize("n", [0, 1])
def test_few_rows(flex_gemm, n, device):
    feats, coords, shape = voxels(n, 6, device=device, dtype=torch.float32)
    feats.requires_grad_()
    weight = weights(6, 9, (3, 3, 3), torch.float32, device).requires_grad_()
    out, cache = flex_gemm.ops.spconv.sparse_submanifold_conv3d(feats, coords, shape, weight)
    assert out.shape == (n, 9) and cache.neighbor_map.shape == (n, 27)
    out.sum().backward()
    assert feats.grad.shape == feats.shape and torch.isfinite(weight.grad).all()
    strided, places, _ = flex_gemm.ops.spconv.sparse_conv3d(
        feats, coords, shape, weight, stride=(2, 2, 2), padding=(1, 1, 1)
    )
    assert strided.shape == (len(places), 9) and (n or len(places) == 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("channels", [24, 48, 7])
def test_any_channels_and_dtypes(flex_gemm, dtype, channels):
    feats, coords, shape = voxels(60, channels, dtype=dtype)
    weight, bias = weights(channels, 5, (3, 3, 3), dtype) / 10, torch.randn(5)
    leaves = [one.requires_grad_() for one in (feats, weight)]
    out, _ = flex_gemm.ops.spconv.sparse_submanifold_conv3d(feats, coords, shape, weight, bias)
    cpu = [one.detach().double().requires_grad_() for one in leaves]
    want = by_loop(cpu[0], coords, cpu[1], bias, coords, *((1, 1, 1),) * 3, shape)
    tolerance = {torch.float16: 1e-2, torch.bfloat16: 6e-2, torch.float32: 1e-5}[dtype]
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance * 3)
    grads = torch.autograd.grad(out.float().square().sum(), leaves)
    wants = torch.autograd.grad(want.square().sum(), cpu)
    for got, reference in zip(grads, wants, strict=True):
        assert got.dtype == dtype
        scale = reference.abs().max()
        torch.testing.assert_close(got.double() / scale, reference / scale, rtol=0, atol=tolerance * 3)


def test_inputs_need_not_be_contiguous(flex_gemm):
    feats, coords, shape = voxels(50, 4)
    weight = weights(4, 4, (3, 3, 3))
    want, _ = flex_gemm.ops.spconv.sparse_submanifold_conv3d(feats, coords, shape, weight)
    wide, tall = torch.randn(50, 8).double(), torch.zeros(4, 50).int()
    wide[:, ::2], tall[:] = feats, coords.t()
    odd = weight.permute(4, 0, 1, 2, 3).contiguous().permute(1, 2, 3, 4, 0)
    out, _ = flex_gemm.ops.spconv.sparse_submanifold_conv3d(wide[:, ::2], tall.t(), shape, odd)
    torch.testing.assert_close(out, want)


def test_autocast_changes_nothing_but_lets_the_weight_follow(flex_gemm):
    feats, coords, shape = voxels(20, 4, dtype=torch.float32)
    weight = weights(4, 4, (3, 3, 3), torch.float32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = flex_gemm.ops.spconv.sparse_submanifold_conv3d(feats, coords, shape, weight)
    assert out.dtype == torch.float32
    out.sum().backward()
    assert weight.grad.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):  # features that a linear layer made
        out, _ = flex_gemm.ops.spconv.sparse_submanifold_conv3d(feats.bfloat16(), coords, shape, weight)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert weight.grad.dtype == torch.float32


class TestCaches:
    def test_arrays_of_the_contract(self, flex_gemm):
        _, coords, shape = voxels(40, 2)
        cache = flex_gemm.ops.spconv.SubMConv3dFunction._compute_neighbor_cache(coords, shape, (3, 3, 3), (1, 1, 1))
        table = cache["neighbor_map"]
        assert table.dtype == torch.uint32 and table.shape == (40, 27) and table.is_contiguous()
        signed = table.view(torch.int32)
        assert torch.equal(signed[:, 13], torch.arange(40).int())
        bits = sum((signed[:, v] >= 0).int() << v for v in range(27))
        assert torch.equal(cache.gray_code, bits)
        pairs = sum(int((signed[:, v] >= 0).sum()) for v in range(27))
        assert int(cache.valid_signal_seg.view(torch.int32)[-1]) == pairs
        assert len(cache.valid_signal_i) == len(cache.valid_signal_o) == pairs
        starts = cache.valid_kernel_seg_callback(16)
        assert len(starts) == 4 and int(starts[-1]) == len(cache.valid_kernel_callback(16))
        with pytest.raises(AttributeError):
            cache["neighbor_map_bwd"]

    def test_made_by_hand_and_by_chunks(self, flex_gemm):
        spconv = flex_gemm.ops.spconv
        feats, coords, shape = voxels(40, 3)
        weight = weights(3, 4, (3, 3, 3)).requires_grad_()
        want, cache = spconv.sparse_submanifold_conv3d(feats, coords, shape, weight)
        hand = spconv.SubMConv3dNeighborCache(neighbor_map=cache["neighbor_map"])
        out, same = spconv.sparse_submanifold_conv3d(feats, coords, shape, weight, None, hand)
        assert same is hand
        torch.testing.assert_close(out, want)
        parts = []
        for rows in (slice(0, 17), slice(17, 40)):
            chunk = spconv.SubMConv3dNeighborCache(neighbor_map=cache["neighbor_map"][rows])
            forward = spconv.SubMConv3dFunction._sparse_submanifold_conv_forward
            parts.append(forward(feats, chunk, weight, None))
        torch.testing.assert_close(torch.cat(parts), want.detach())

    def test_an_assigned_or_changed_map_is_obeyed(self, flex_gemm):
        spconv = flex_gemm.ops.spconv
        feats, coords, shape = voxels(20, 3)
        weight = weights(3, 3, (3, 3, 3))
        _, cache = spconv.sparse_submanifold_conv3d(feats, coords, shape, weight)
        lonely = torch.full((20, 27), -1, dtype=torch.int32)
        lonely[:, 13] = torch.arange(20)
        want = feats @ weight[:, 1, 1, 1].t()
        cache["neighbor_map"].view(torch.int32).copy_(lonely)
        out, _ = spconv.sparse_submanifold_conv3d(feats, coords, shape, weight, None, cache)
        torch.testing.assert_close(out, want)
        cache.neighbor_map = lonely.view(torch.uint32)
        out, _ = spconv.sparse_submanifold_conv3d(feats, coords, shape, weight, None, cache)
        torch.testing.assert_close(out, want)
        assert torch.equal(cache.gray_code, torch.full((20,), 1 << 13).int())

    def test_saved_and_loaded(self, flex_gemm):
        spconv = flex_gemm.ops.spconv
        feats, coords, shape = voxels(20, 3)
        weight = weights(3, 3, (3, 3, 3))
        want, cache = spconv.sparse_submanifold_conv3d(feats, coords, shape, weight)
        file = io.BytesIO()
        torch.save(cache, file)
        loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        assert type(loaded) is spconv.submanifold_conv3d.SubMConv3dNeighborCache
        out, _ = spconv.sparse_submanifold_conv3d(feats, coords, shape, weight, None, loaded)
        torch.testing.assert_close(out, want)

    def test_one_that_does_not_fit(self, flex_gemm):
        spconv = flex_gemm.ops.spconv
        feats, coords, shape = voxels(20, 3)
        _, cache = spconv.sparse_submanifold_conv3d(feats, coords, shape, weights(3, 3, (3, 3, 3)))
        with pytest.raises(ArgumentShapeError, match="another kernel"):
            small = weights(3, 3, (1, 1, 3))
            spconv.sparse_submanifold_conv3d(feats, coords, shape, small, None, cache)
        with pytest.raises(ArgumentShapeError, match="12 rows"):
            spconv.sparse_submanifold_conv3d(feats[:12], coords[:12], shape, weights(3, 3, (3, 3, 3)), None, cache)


def test_parts_that_are_replaced_are_called(flex_gemm, monkeypatch):
    spconv = flex_gemm.ops.spconv
    feats, coords, shape = voxels(20, 3)
    weight = weights(3, 3, (3, 3, 3)).requires_grad_()
    seen = []
    original = spconv.SubMConv3dFunction._sparse_submanifold_conv_backward

    def backward(ctx, grad_output, _):
        feats, weight, bias = ctx.saved_tensors
        seen.append(ctx.neighbor_cache)
        found = original(grad_output, feats, ctx.neighbor_cache, weight, bias)
        return None, None, None, None, found[1], None, None

    monkeypatch.setattr(spconv.SubMConv3dFunction, "backward", staticmethod(backward))
    out, cache = spconv.sparse_submanifold_conv3d(feats, coords, shape, weight)
    out.square().sum().backward()
    assert seen == [cache]
    got = weight.grad.clone()
    monkeypatch.undo()
    weight.grad = None
    out, _ = spconv.sparse_submanifold_conv3d(feats, coords, shape, weight)
    out.square().sum().backward()
    torch.testing.assert_close(got, weight.grad)


def test_a_second_derivative_is_refused(flex_gemm):
    feats, coords, shape = voxels(10, 3)
    weight = weights(3, 3, (3, 3, 3)).requires_grad_()
    out, _ = flex_gemm.ops.spconv.sparse_submanifold_conv3d(feats, coords, shape, weight)
    (grad,) = torch.autograd.grad(out.square().sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()


@pytest.mark.parametrize(
    "change, kind, words",
    [
        ({"weight": (3, 2, 3, 3, 3)}, ArgumentValueError, "odd"),
        ({"weight": (3, 27, 3)}, ArgumentValueError, "C_out, k1"),
        ({"feats": torch.int32}, DataTypeError, "torch.int32"),
        ({"feats": torch.float16}, DataTypeError, "torch.float16"),
        ({"rows": 9}, ArgumentShapeError, "9 coordinates"),
        ({"algorithm": "magic"}, ArgumentValueError, "magic"),
        ({"dilation": (1, 1)}, ArgumentValueError, "dilation"),
        ({"dilation": (0, 1, 1)}, ArgumentValueError, "dilation"),
    ],
)
def test_bad_input_has_one_clear_error(flex_gemm, change, kind, words):
    feats, coords, shape = voxels(10, 3, dtype=torch.float32)
    weight = torch.randn(change.get("weight", (3, 3, 3, 3, 3)))
    feats = feats.to(change.get("feats", torch.float32))
    coords = coords[: change.get("rows", 10)]
    flex_gemm.ops.spconv.set_algorithm(change.get("algorithm", "explicit_gemm"))
    with pytest.raises(kind, match=words) as caught:
        flex_gemm.ops.spconv.sparse_submanifold_conv3d(
            feats, coords, shape, weight, dilation=change.get("dilation", (1, 1, 1))
        )
    assert isinstance(caught.value, SparseBridgeError)


def test_the_tf32_switch(flex_gemm):
    from sparse_bridge.adapters.flex_gemm import options

    config = flex_gemm.kernels.triton.spconv.config
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for torch_allows in (True, False):
            torch.backends.cuda.matmul.allow_tf32 = torch_allows
            assert options.allow_tf32() is torch_allows
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    for chosen in (True, False):
        config.allow_tf32 = chosen
        assert options.allow_tf32() is chosen


def test_kernels_without_a_counterpart_say_so(flex_gemm):
    with pytest.raises(UnsupportedError, match=r"ops\.spconv"):
        flex_gemm.kernels.triton.sparse_conv_fwd_masked_implicit_gemm(1, 2)


def test_the_first_product_is_told_to_the_warm_up(flex_gemm, monkeypatch):
    from sparse_bridge.adapters.flex_gemm import conv, warmup
    from sparse_bridge.core.warmup import compilation

    seen = []
    real = conv.submanifold_cache

    def spy(*args):
        told = [one for one in compilation._described if isinstance(one, warmup.FirstProduct)]
        (only,) = [next(one.products()) for one in told] or [None]
        # Whoever keeps the product keeps it told.
        seen.append(only)
        return real(*args)

    monkeypatch.setattr(conv, "submanifold_cache", spy)
    warmup.reset()
    compilation.reset()
    feats, coords, shape = voxels(10, 3)
    weight, bias = weights(3, 4, (3, 3, 3)).requires_grad_(), torch.zeros(4).double()
    for _ in range(2):
        flex_gemm.ops.spconv.sparse_submanifold_conv3d(feats, coords, shape, weight, bias)
    first, later = seen
    assert first.weight is weight and first.epilogue.bias is bias and first.layout == "ovi"
    assert first.symmetric and first.trains and first.sizes == (len(feats), len(feats))
    assert later is None, "told once, and gone with its map"
