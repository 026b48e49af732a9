"""TRELLIS.2's three backends: the same voxels, weights and numbers."""

from __future__ import annotations

import pytest
import torch

import sparse_bridge
from compat.models.flex_gemm import trellis2_vae

NATIVE = ("flex_gemm", "chunked")  # the layer holds its own weights
OPTIONS = {"model_channels": (16, 32, 64), "num_blocks": (1, 1, 1), "use_checkpoint": False}


def scene(seed=0):
    generator = torch.Generator().manual_seed(seed)
    cells = torch.randperm(10**3, generator=generator)[:300].sort().values
    axes = torch.stack([cells // 100, cells // 10 % 10, cells % 10], 1)
    batch = (torch.arange(300) > 180).long().unsqueeze(1)
    feats = torch.randn(300, 6, generator=generator, dtype=torch.float64)
    return feats, torch.cat([batch, axes], 1).int()


def adapted(state, backend):
    """Weights of the native layers under the names and layouts of another backend."""
    found = {}
    for name, value in state.items():
        if name.endswith((".conv.weight", "conv1.weight", "conv2.weight")):
            if backend == "torchsparse":  # its kernel offsets run along x first
                value = value.permute(3, 2, 1, 4, 0).flatten(0, 2).contiguous()
                name = name.replace(".weight", ".conv.kernel")
            elif backend == "spconv":
                name = name.replace(".weight", ".conv.weight")
        elif name.endswith((".conv.bias", "conv1.bias", "conv2.bias")):
            name = name if backend in NATIVE else name.replace(".bias", ".conv.bias")
        found[name] = value
    return found


def run(backend, framework, state, autocast=None, **options):
    sparse_bridge.disable()
    profile = {"profile": "2.1"} if framework == "torchsparse" else {}
    # Where the real spconv is imported already, its patched layers compute.
    with sparse_bridge.enable(framework, **profile):
        torch.manual_seed(1)
        network = trellis2_vae.build(backend=backend, **{**OPTIONS, **options})
        narrow = options.get("use_fp16") or autocast
        network = network if narrow else network.double()
        if state is not None:
            network.load_state_dict(adapted(state, backend))
        feats, coords = scene()
        feats = (feats.float() if narrow else feats).requires_grad_()
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            outputs = trellis2_vae.outputs(network.train()(feats, coords))
        (gradient,) = torch.autograd.grad(
            sum(one.float().square().mean() if narrow else one.square().mean() for one in outputs),
            feats,
        )
        return network.state_dict(), [*outputs, gradient]


@pytest.fixture(scope="module")
def native():
    return run("flex_gemm", "flex_gemm", None)


@pytest.mark.parametrize("backend", ["spconv", "torchsparse", "chunked"])
def test_the_same_numbers(native, backend):
    state, wanted = native
    framework = "flex_gemm" if backend == "chunked" else backend
    _, found = run(backend, framework, state)
    assert len(found) == len(wanted) >= 4
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_recomputed_blocks(native):
    """The project's default: blocks of the backward pass are computed again, on the same maps."""
    state, wanted = native
    _, found = run("flex_gemm", "flex_gemm", state, use_checkpoint=True)
    for got, want in zip(found, wanted, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("backend", ["flex_gemm", "spconv", "torchsparse"])
@pytest.mark.parametrize("how", [{"use_fp16": True}, {"autocast": torch.bfloat16}], ids=str)
def test_narrow_weights_and_autocast(native, backend, how):
    """Half weights as the project sets them, and autocast around the whole network."""
    state, wanted = native
    state = {name: value.float() for name, value in state.items()}
    _, found = run(backend, backend, state, **how)
    for got, want in zip(found, wanted, strict=True):
        want = want.float()
        error = (got.float() - want).norm() / want.norm().clamp(min=1e-6)
        assert error < 0.05, (got.shape, float(error))
