"""What every layer keeps whatever the values: gradients, precision, repeatability."""

from __future__ import annotations

import importlib

import pytest
import torch

from tests import checks
from tests.clouds import cloud

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def pattern(ME, channels=2, dtype=torch.float64, device="cpu", dimension=2):
    """Eight pixels per item, as MinkowskiEngine's own tests use them."""
    drawing = ["   X   ", "  X X  ", " XXXXX "]
    sites = [(r, c) for r, line in enumerate(drawing) for c, ch in enumerate(line) if ch == "X"]
    coords = torch.tensor([[b, r, c, *([0] * (dimension - 2))] for b in (0, 1) for r, c in sites])
    feats = torch.arange(len(coords) * channels, dtype=dtype).reshape(-1, channels)
    leaf = (feats + torch.rand_like(feats)).to(device).requires_grad_()
    return ME.SparseTensor(leaf, coords.int().to(device)), leaf


def functions(ME):
    """(name, function of the features, extra leaves)."""
    x, leaf = pattern(ME)
    manager, key = x.coordinate_manager, x.coordinate_map_key
    kernel = torch.randn(9, 2, 3, dtype=torch.float64, requires_grad=True)
    modes = ME.PoolingMode
    down = ME.KernelGenerator(3, 2, dimension=2)
    cells = ME.KernelGenerator(2, 2, dimension=2)
    coarse = manager.stride(key, 2)
    n_coarse = manager.size(coarse)
    low = torch.randn(n_coarse, 2, dtype=torch.float64, requires_grad=True)
    grow = ME.KernelGenerator(3, 2, expand_coordinates=True, dimension=2)
    fine = ME.SparseTensor(
        low.detach(),
        torch.cat([torch.arange(n_coarse)[:, None] % 2, 2 * torch.arange(n_coarse)[:, None].expand(-1, 2)], 1).int(),
        tensor_stride=2,
        coordinate_manager=manager,
    )
    mask = torch.arange(len(leaf)) % 3 > 0
    new = ME.CoordinateMapKey
    glob = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    origin = manager.origin()
    yield (
        "conv",
        lambda f, k: ME.MinkowskiConvolutionFunction.apply(f, k, down, None, key, new(3), manager),
        (leaf, kernel),
    )
    yield (
        "transpose",
        lambda f, k: ME.MinkowskiConvolutionTransposeFunction.apply(f, k, down, None, coarse, key, manager),
        (low, kernel),
    )
    yield (
        "generative",
        lambda f, k: ME.MinkowskiConvolutionTransposeFunction.apply(
            f, k, grow, None, fine.coordinate_map_key, new(3), manager
        ),
        (low, kernel),
    )
    for mode in ("SUM", "AVG", "MAX"):
        for generator in (down, cells):
            yield (
                mode,
                lambda f, m=mode, g=generator: ME.MinkowskiLocalPoolingFunction.apply(
                    f, modes[f"LOCAL_{m}_POOLING"], g, key, new(3), manager
                ),
                (leaf,),
            )
        yield (
            f"global {mode}",
            lambda f, m=mode: ME.MinkowskiGlobalPoolingFunction.apply(
                f, modes[f"GLOBAL_{m}_POOLING_KERNEL"], key, new(3), manager
            ),
            (leaf,),
        )
    yield (
        "unpool",
        lambda f: ME.MinkowskiLocalPoolingTransposeFunction.apply(
            f, modes.LOCAL_AVG_POOLING, down, coarse, key, manager
        ),
        (low,),
    )
    for mode in ME.BroadcastMode:
        yield (
            mode.name,
            lambda f, g, m=mode: ME.MinkowskiBroadcastFunction.apply(f, g, m, key, origin, manager),
            (leaf, glob),
        )
    yield "norm", lambda f: ME.MinkowskiInstanceNormFunction.apply(f, key, None, manager), (leaf,)
    for keep in (mask, torch.zeros_like(mask)):
        yield ("prune", lambda f, m=keep: ME.MinkowskiPruningFunction.apply(f, m, key, new(3), manager), (leaf,))
    yield ("union", lambda f, g: ME.MinkowskiUnionFunction.apply([key, coarse], new(3), manager, f, g), (leaf, low))
    query = torch.rand(9, 3, dtype=torch.float64) * 3
    query[:, 0] = torch.arange(9) % 2
    yield ("interpolate", lambda f: ME.MinkowskiInterpolationFunction.apply(f, query, key, manager)[0], (leaf,))
    rows = torch.arange(len(leaf)) // 3
    yield (
        "direct max",
        lambda f: ME.MinkowskiDirectMaxPoolingFunction.apply(torch.arange(len(leaf)).int(), rows.int(), f, 6),
        (leaf,),
    )


def test_gradients_of_every_function(ME):
    check = importlib.import_module("MinkowskiEngine.utils.gradcheck").gradcheck
    names = []
    for name, function, inputs in functions(ME):
        assert check(function, inputs), name
        names.append(name)
    assert len(names) == 21


def small_net(ME, device):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        ME.MinkowskiConvolution(4, 16, kernel_size=3, dimension=3),
        ME.MinkowskiBatchNorm(16),
        ME.MinkowskiReLU(inplace=True),
        ME.MinkowskiChannelwiseConvolution(16, kernel_size=3, bias=True, dimension=3),
        ME.MinkowskiConvolution(16, 32, kernel_size=2, stride=2, bias=True, dimension=3),
        ME.MinkowskiInstanceNorm(32),
        ME.MinkowskiELU(),
        ME.MinkowskiMaxPooling(3, 2, dimension=3),
        ME.MinkowskiConvolution(32, 16, kernel_size=1, dimension=3),
        ME.MinkowskiConvolutionTranspose(16, 8, kernel_size=2, stride=2, dimension=3),
        ME.MinkowskiLinear(8, 8),
        ME.MinkowskiAvgPooling(2, 2, dimension=3),
        ME.MinkowskiGenerativeConvolutionTranspose(8, 4, kernel_size=2, stride=2, dimension=3),
    ).to(device)


def cloud_tensor(ME, device, seed=0):
    coords = cloud((12, 12, 12), 2, 0.15, seed, device)
    generator = torch.Generator().manual_seed(seed)
    leaf = torch.randn(len(coords), 4, generator=generator).to(device).requires_grad_()
    return ME.SparseTensor(leaf, coords), leaf


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(ME, device, dtype):
    net = small_net(ME, device)
    x, _ = cloud_tensor(ME, device)
    want = net(x).F.detach()
    x, leaf = cloud_tensor(ME, device)
    with torch.autocast(device, dtype=dtype):
        y = net(x)
        y = y + y
        g = ME.MinkowskiGlobalMaxPooling()(y)
        z = ME.MinkowskiBroadcastMultiplication()(y, g)
        sampled = y.features_at_coordinates(y.C.float())
    assert y.F.dtype == z.F.dtype == sampled.dtype == dtype
    checks.assert_close(sampled, y.F.double(), dtype)
    z.F.float().sum().backward()
    assert leaf.grad.dtype == torch.float32 and torch.isfinite(leaf.grad).all()
    assert all(p.grad.dtype == torch.float32 for p in net.parameters())
    error = (y.F.detach().float() / 2 - want).square().mean().sqrt()
    assert error / want.square().mean().sqrt() < (0.02 if dtype == torch.float16 else 0.12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_networks(ME, device, dtype):
    net = small_net(ME, device).to(dtype)
    x, _ = cloud_tensor(ME, device)
    y = net(x._with(x.F.to(dtype)))
    assert y.F.dtype == dtype
    y.F.float().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in net.parameters())


@pytest.mark.parametrize("device", DEVICES)
def test_results_repeat_bit_by_bit(ME, device):
    results = []
    for _ in range(3):
        net = small_net(ME, device)
        x, leaf = cloud_tensor(ME, device)
        y = net(x)
        union = y + ME.MinkowskiSumPooling(2, 2, dimension=3)(x)
        query = torch.rand(200, 4, generator=torch.Generator().manual_seed(1)) * 12
        query[:, 0] = torch.arange(200) % 2
        sampled = union.features_at_coordinates(query.to(device))
        (union.F.sum() + sampled.square().sum()).backward()
        results.append((y.C, union.C, y.F, union.F, sampled, leaf.grad, *(p.grad for p in net.parameters())))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_rows_do_not_depend_on_the_device_code(ME):
    """Row orders are a promise: the torch code and the documented rules must agree."""
    x, _ = cloud_tensor(ME, "cpu", 3)
    down = x.coordinate_manager.stride(x.coordinate_map_key, 2)
    cells = torch.cat([x.C[:, :1], x.C[:, 1:] // 2 * 2], 1)
    want = list(dict.fromkeys(map(tuple, cells.tolist())))
    assert [tuple(s) for s in x.coordinate_manager.get_coordinates(down).tolist()] == want


@pytest.mark.gpu
def test_rows_are_the_same_on_the_gpu(ME):
    found = []
    for device in ("cpu", "cuda"):
        net = small_net(ME, device)
        x, _ = cloud_tensor(ME, device, 4)
        y = net(x)
        prune = ME.MinkowskiPruning()(y, y.C[:, 1] % 2 == 0)
        found.append([t.C.cpu() for t in (y, prune, y + prune, x + y, ME.MinkowskiGlobalPooling()(y))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_gradient_reaches_everything_through_checkpointing(ME):
    from torch.utils.checkpoint import checkpoint

    conv = ME.MinkowskiConvolution(4, 4, kernel_size=3, dimension=3)
    x, leaf = cloud_tensor(ME, "cpu")

    def run(features):
        return conv(x._with(features)).F

    checkpoint(run, leaf, use_reentrant=False).sum().backward()
    got = leaf.grad.clone(), conv.kernel.grad.clone()
    leaf.grad = conv.kernel.grad = None
    run(leaf).sum().backward()
    assert torch.equal(got[0], leaf.grad) and torch.equal(got[1], conv.kernel.grad)


def test_inference_mode(ME):
    net = small_net(ME, "cpu").eval()
    x, _ = cloud_tensor(ME, "cpu")
    want = net(x).F.detach()
    with torch.inference_mode():
        x, _ = cloud_tensor(ME, "cpu")
        assert torch.equal(net(x).F, want)
