"""Published networks, forward and backward, against the oracle; keys and shapes of checkpoints."""

from __future__ import annotations

import pytest
import torch

from tests import checks
from tests.clouds import cloud

from . import generative_networks, networks, reference

REF = reference.namespace()
SMALL = (4, 6, 8, 10, 10, 8, 6, 6)


def build(make, seed=0):
    """(network on the stand-in, the same on the oracle, both with the same weights, in float64)."""
    torch.manual_seed(seed)
    mine, theirs = make
    mine = mine.double()
    weights = {}
    for name, value in mine.state_dict().items():
        if value.is_floating_point() and "running" not in name:
            noise = torch.randn(value.shape, dtype=torch.float64)
            scale = 0.3 if ".bn." in name or value.ndim == 1 else value[0].numel() ** -0.5 * 2
            weights[name] = noise * scale + (1.0 if name.endswith("bn.weight") else 0.0)
        else:
            weights[name] = value
    mine.load_state_dict(weights, strict=True)
    theirs.load_state_dict(weights, strict=True)
    return mine.train(), theirs.train()


def scene(shape=(9, 8, 7), dimension=3, channels=3, seed=0, share=0.25):
    coords = cloud(shape, 2, share, seed)
    coords[:, 1:] -= 2
    feats = torch.randn(len(coords), channels, dtype=torch.float64)
    return coords, feats


def aligned(got, want):
    """Rows of `want` in the order of `got`; the coordinates must be the same set."""
    mine = [tuple(site) for site in got.C.tolist()]
    assert set(mine) == set(want.sites) and len(mine) == len(want.sites)
    return torch.tensor([want.sites[site] for site in mine], dtype=torch.int64)


def compare(ME, nets, coords, feats, run, options=()):
    """Outputs, input gradient and parameter gradients of both; `run(net, x)` gives the outputs."""
    results = []
    for net, space in zip(nets, (ME, REF), strict=True):
        leaf = feats.clone().requires_grad_()
        outputs = run(net, space.SparseTensor(leaf, coords))
        results.append((leaf, outputs))
    (leaf, got), (ref_leaf, want) = results
    loss = ref_loss = 0.0
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.tensor_stride == b.tensor_stride
        rows = aligned(a, b)
        checks.assert_close(a.F, b.F[rows], torch.float64, f"output {number}")
        up = torch.randn(b.F.shape, dtype=torch.float64)
        loss, ref_loss = loss + (a.F * up[rows]).sum(), ref_loss + (b.F * up).sum()
    loss.backward()
    ref_loss.backward()
    checks.assert_close(leaf.grad, ref_leaf.grad, torch.float64, "input gradient")
    theirs = dict(nets[1].named_parameters())
    for name, value in nets[0].named_parameters():
        if theirs[name].grad is None:
            assert value.grad is None or not value.grad.any(), name
            continue
        checks.assert_close(value.grad, theirs[name].grad, torch.float64, name)
    return got


def pair(network, ME, *args, **kwargs):
    return network(ME, *args, **kwargs), network(REF, *args, **kwargs)


def test_minkunet34c(ME):
    nets = build(pair(networks.MinkUNet, ME, 3, 5, planes=SMALL, init=4))
    coords, feats = scene()
    (out,) = compare(ME, nets, coords, feats, lambda net, x: [net(x)])
    assert torch.equal(out.C, coords)


def test_res16unet34c_with_pooled_positions(ME):
    options = {"planes": SMALL, "init": 4, "momentum": 0.02, "through_generator": True}
    nets = build(pair(networks.MinkUNet, ME, 3, 5, layers=(1,) * 8, levels=True, **options))
    coords, feats = scene(seed=1)
    positions = torch.randn(len(coords), 3, dtype=torch.float64)

    def run(net, x):
        out, levels = net(x)
        return [out, *levels, *networks.mask_decoder_levels(net.ME, out, positions)]

    compare(ME, nets, coords, feats, run)


def test_fcgf(ME):
    nets = build(
        pair(networks.ResUNetBN2C, ME, 1, 6, widths=(4, 6, 8, 10), up_widths=(6, 5, 6, 8), conv1_kernel_size=5)
    )
    coords, feats = scene(seed=2, channels=1)
    (out,) = compare(ME, nets, coords, feats, lambda net, x: [net(x)])
    assert torch.allclose(out.F.norm(dim=1), torch.ones((), dtype=torch.float64))


def test_fcaf3d(ME):
    nets = build(
        pair(generative_networks.FCAF3D, ME, 3, widths=(4, 4, 6, 8, 10), counts=(1, 1, 1, 1), out=6, classes=3, keep=9)
    )
    coords, feats = scene((40, 36, 30), seed=3, share=0.03)

    def run(net, x):
        return [part for level in net(x) for part in level]

    outputs = compare(ME, nets, coords, feats, run)
    assert [out.tensor_stride[0] for out in outputs[::3]] == [64, 32, 16, 8]


def test_4dmos(ME):
    step, stem = [2, 2, 2, 1], [5, 5, 5, 1]
    nets = build(
        pair(
            networks.MinkUNet,
            ME,
            1,
            3,
            dimension=4,
            layers=(1,) * 8,
            init=2,
            stem=stem,
            step=step,
            planes=(2, 3, 4, 5, 5, 4, 3, 2),
        )
    )
    coords, feats = scene((6, 5, 4, 3), 4, 1, seed=4, share=0.15)
    compare(ME, nets, coords, feats, lambda net, x: [net(x)])


@pytest.mark.slow
def test_pcgc(ME):
    nets = build(pair(generative_networks.PCGC, ME, (4, 8, 8, 8, 4), (8, 8, 8)))
    coords, feats = scene((12, 12, 12), seed=5, channels=1, share=0.1)

    def run(net, x):
        latent, found, out = net(x)
        return [latent, *found, out]

    compare(ME, nets, coords, feats, run)


def test_completion(ME):
    nets = build(pair(generative_networks.Completion, ME, (3, 4, 5, 6)))
    coords, feats = scene((10, 9, 8), seed=6, channels=1, share=0.1)
    sites = {tuple(site) for site in coords.tolist()}

    def wanted(x):
        stride = x.tensor_stride
        cells = {(b, *(c // t * t for c, t in zip(u, stride, strict=True))) for b, *u in sites}
        return torch.tensor([tuple(site) in cells for site in x.C.tolist()])

    def run(net, x):
        found, out = net(x, wanted)
        return [*found, out]

    compare(ME, nets, coords, feats, run)


# Names and shapes of published checkpoints: (name, shape) of the convolutions of one stage each.
MINKUNET34C = {
    "conv0p1s1.kernel": (125, 3, 32),
    "bn0.bn.weight": (32,),
    "bn0.bn.running_mean": (32,),
    "bn0.bn.num_batches_tracked": (),
    "conv1p1s2.kernel": (8, 32, 32),
    "bn1.bn.bias": (32,),
    "block1.0.conv1.kernel": (27, 32, 32),
    "block1.0.norm1.bn.weight": (32,),
    "block2.0.downsample.0.kernel": (32, 64),
    "block2.0.downsample.1.bn.weight": (64,),
    "block4.5.conv2.kernel": (27, 256, 256),
    "convtr4p16s2.kernel": (8, 256, 256),
    "bntr4.bn.weight": (256,),
    "block5.0.conv1.kernel": (27, 384, 256),
    "convtr7p2s2.kernel": (8, 96, 96),
    "block8.0.conv1.kernel": (27, 128, 96),
    "block8.0.downsample.0.kernel": (128, 96),
    "final.kernel": (96, 20),
    "final.bias": (1, 20),
}
FCGF = {
    "conv1.kernel": (343, 1, 32),
    "norm1.bn.weight": (32,),
    "block1.conv1.kernel": (27, 32, 32),
    "block1.norm2.bn.running_var": (32,),
    "conv4.kernel": (27, 128, 256),
    "conv4_tr.kernel": (27, 256, 128),
    "block4_tr.conv2.kernel": (27, 128, 128),
    "conv3_tr.kernel": (27, 256, 64),
    "conv2_tr.kernel": (27, 128, 64),
    "conv1_tr.kernel": (96, 64),
    "final.kernel": (64, 32),
    "final.bias": (1, 32),
}
FCAF = {
    "conv1.0.kernel": (27, 3, 64),
    "conv1.1.weight": (1, 64),
    "conv1.1.bias": (1, 64),
    "layer1.0.downsample.0.kernel": (1, 64, 64),
    "layer2.0.conv1.kernel": (27, 64, 128),
    "layer4.2.norm2.bn.weight": (512,),
    "up_block_3.0.kernel": (8, 512, 256),
    "up_block_3.3.kernel": (27, 256, 256),
    "out_block_0.0.kernel": (27, 64, 128),
    "centerness_conv.kernel": (128, 1),
    "reg_conv.kernel": (128, 6),
    "cls_conv.bias": (1, 18),
}


def minkunet18(ME):
    return networks.MinkUNet(ME, layers=(2,) * 8)


@pytest.mark.parametrize(
    ("network", "wanted", "count"),
    [
        (networks.MinkUNet, MINKUNET34C, None),
        (minkunet18, {"block4.1.conv2.kernel": (27, 256, 256)}, 290),
        (networks.ResUNetBN2C, FCGF, None),
        (generative_networks.FCAF3D, FCAF, None),
    ],
    ids=["MinkUNet34C", "MinkUNet18", "FCGF", "FCAF3D"],
)
def test_checkpoint_names_and_shapes(ME, network, wanted, count):
    with torch.device("meta"):
        found = {name: tuple(value.shape) for name, value in network(ME).state_dict().items()}
    assert {name: found.get(name) for name in wanted} == wanted
    assert count is None or len(found) == count


def smoothed(ME, net):
    """SiLU for ReLU: one activation that changes sides between roundings moves every gradient
    before it by up to 1 %, fp32 against fp64 on the CPU already."""
    for module in list(net.modules()):
        for name, child in module.named_children():
            if isinstance(child, ME.MinkowskiReLU):
                setattr(module, name, ME.MinkowskiSiLU())


@pytest.mark.slow
def test_fp32_gradients_are_as_good_as_fp32(ME):
    torch.manual_seed(0)
    net = networks.MinkUNet(ME, 3, 5, planes=(32, 32, 64, 64, 64, 64, 48, 48)).train()
    smoothed(ME, net)
    coords, feats = scene((30, 30, 30), seed=8, share=0.1)
    results = []
    for dtype in (torch.float64, torch.float32):
        net.to(dtype).zero_grad()
        leaf = feats.to(dtype, copy=True).requires_grad_()
        y = net(ME.SparseTensor(leaf, coords))
        y.F.square().mean().backward()
        results.append((y.F, leaf.grad, *(p.grad.clone() for p in net.parameters())))
    for want, found in zip(*results, strict=True):
        error = (found.double() - want).square().mean().sqrt()
        assert error <= 1e-4 * want.square().mean().sqrt()


@pytest.mark.gpu
def test_minkunet_on_the_gpu(ME):
    torch.manual_seed(0)
    net = networks.MinkUNet(ME, 3, 5, planes=(32, 32, 64, 64, 64, 64, 48, 48)).train()
    smoothed(ME, net)
    coords, feats = scene((30, 30, 30), seed=8, share=0.1)
    results = []
    for device in ("cpu", "cuda", "cuda"):
        net.to(device).zero_grad()
        leaf = feats.float().to(device).requires_grad_()
        y = net(ME.SparseTensor(leaf, coords.to(device)))
        y.F.square().mean().backward()
        assert torch.equal(y.C.cpu(), coords)
        results.append((y.F, leaf.grad, *(p.grad.clone() for p in net.parameters())))
    for a, b, c in zip(*results, strict=True):
        assert torch.equal(b, c)
        checks.assert_close(b, a, "tf32")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_minkunet_in_mixed_precision_on_the_gpu(ME, dtype):
    torch.manual_seed(0)
    net = networks.MinkUNet(ME, 3, 5, layers=(1,) * 8).cuda().train()
    coords, feats = scene((20, 20, 20), seed=9, share=0.1)
    x = ME.SparseTensor(feats.float().cuda(), coords.cuda())
    want = net(x).F.detach()
    with torch.autocast("cuda", dtype=dtype):
        y = net(x)
    assert y.F.dtype == dtype
    y.F.float().square().mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in net.parameters())
    error = (y.F.detach().float() - want).square().mean().sqrt() / want.square().mean().sqrt()
    assert error < (0.02 if dtype == torch.float16 else 0.1)
