"""Memory of graphs that torch takes for free."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge.core.capture import graph_regions
from sparse_bridge.core.capture.graph_capture import GraphMemory, captured

ROWS = 40_000


class Head(nn.Module):
    def __init__(self, sp):
        super().__init__()
        layers = [sp.SubMConv3d(64, 64, 3, indice_key="layers", bias=False) for _ in range(4)]
        self.layers, self.head = sp.SparseSequential(*layers), nn.Linear(64, 64)

    def forward(self, x):
        return self.head(self.layers(x).features)


def scene(sp, channels):
    generator = torch.Generator("cuda").manual_seed(1)
    places = torch.randperm(64**3, generator=generator, device="cuda")[:ROWS]
    coords = torch.stack([places * 0, places // 4096, places // 64 % 64, places % 64], 1).int()
    values = torch.randn(ROWS, channels, generator=generator, device="cuda")
    return sp.SparseConvTensor(values, coords, [64] * 3, 1)


@pytest.fixture
def sp(untaught, uncompared, nothing_learnt):
    return untaught


def _earlier_models():
    """The workspace of each of torch's 32 streams for captures is made while others are captured, which go."""
    values, device = torch.ones(64, 64, device="cuda"), torch.device("cuda", 0)
    assert (values @ values).isfinite().all()  # this thread's cuBLAS is in use
    for _ in range(32):
        memory = GraphMemory(device)
        memory.multiplies = True
        with torch.cuda.stream(memory.stream):
            memory.captured(lambda pool: captured(lambda: values @ values, pool))


@pytest.mark.gpu
@pytest.mark.parametrize("earlier", [lambda: None, _earlier_models], ids=["first", "after others"])
def test_a_workspace_that_a_program_frees(sp, earlier):
    """That of cuBLAS, as torch does where a model is compiled with `mode="reduce-overhead"`."""
    earlier()
    model = sparse_bridge.optimize(Head(sp).cuda(), graphs=True)

    def step():
        model.zero_grad()
        with torch.autocast("cuda", torch.float16):
            model(scene(sp, 64)).float().square().mean().backward()
        return model.head.weight.grad.clone()  # which is summed in parts, as there are many rows

    for _ in range(6):
        before = step()
    replays = graph_regions.region_of(model).replayer.training.hits
    assert replays
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.full((1 << 18,), 7.0, device="cuda") for _ in range(512)]
    assert torch.equal(step(), before)
    assert graph_regions.region_of(model).replayer.training.hits == replays + 1
    assert all(bool((other == 7.0).all()) for other in others)


@pytest.mark.gpu
@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
def test_a_model_that_goes_before_its_graph_is_over(sp, trains):
    """`empty_cache` unmaps the memory of graphs that nobody has any more."""
    layers = [sp.SubMConv3d(512, 512, 3, indice_key="layers", bias=False) for _ in range(24)]
    for layer in layers:
        nn.init.normal_(layer.weight, std=(512 * 6) ** -0.5)  # five neighbours: features neither grow nor go
    models = [sparse_bridge.optimize(sp.SparseSequential(*layers).cuda().half().train(trains), graphs=True)]
    x = scene(sp, 512)

    def call():
        with torch.set_grad_enabled(trains):
            given = sp.SparseConvTensor(x.features.half(), x.indices.clone(), x.spatial_shape, 1)
            found = models[0](given).features
            if trains:
                found.float().square().mean().backward()
        return found.detach()

    for _ in range(6):
        expected = call()
    region = graph_regions.region_of(models[0]).replayer
    assert (region.training if trains else region).hits and expected.isfinite().all() and expected.any()
    del region, layers, layer
    torch.cuda.synchronize()
    found = call()
    models.clear()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    assert torch.equal(found, expected)
