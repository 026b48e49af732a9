"""TRELLIS.2's three backends: the same voxels, weights and numbers."""

from __future__ import annotations

import pytest
import torch

import sparse_bridge
from compat.models.flex_gemm import trellis2_vae
from compat.models.flex_gemm.trellis2_sparse import CONVOLUTIONS
from compat.models.spconv import trellis_sparse

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
            sum(one.float().square().mean() if narrow else one.square().mean() for one in outputs), feats
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


class Levels(torch.nn.Module):
    """Layers between a coarser grid, the finer one that it came from, and its subdivision."""

    def __init__(self, backend):
        super().__init__()
        conv = CONVOLUTIONS[backend]
        self.tensor = conv.tensor
        self.layers = torch.nn.ModuleList(torch.nn.ModuleDict({"conv": conv(6, 6, 3)}) for _ in range(4))

    def forward(self, feats, coords):
        x = self.layers[0]["conv"](self.tensor(feats, coords))
        coarse = self.layers[1]["conv"](trellis_sparse.SparseDownsample(2)(x))
        fine = self.layers[2]["conv"](trellis_sparse.SparseUpsample()(coarse) + x)
        return self.layers[3]["conv"](trellis_sparse.SparseSubdivide()(fine))


@pytest.mark.parametrize("backend", ["spconv", "torchsparse"])
def test_between_resolutions(backend):
    """What one resolution knows of another travels in the tensors' spatial cache."""
    results = []
    for one in ("flex_gemm", backend):
        sparse_bridge.disable()
        profile = {"profile": "2.1"} if one == "torchsparse" else {}
        with sparse_bridge.enable(one, **profile):
            torch.manual_seed(2)
            network = Levels(one).double()
            if results:
                network.load_state_dict(adapted(results[0][0], one))
            feats, coords = scene()
            y = network(feats.requires_grad_(), coords)
            (gradient,) = torch.autograd.grad(y.feats.square().mean(), feats)
            rows = trellis2_vae.in_order(y.feats, y.coords)
            results.append((network.state_dict(), rows, gradient))
    for got, want in zip(results[1][1:], results[0][1:], strict=True):
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
