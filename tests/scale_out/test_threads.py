"""Several threads run layers at once: the same bits as one after the other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.patience import PATIENCE

from .networks import cloud, run

THREADS, ROUNDS = 4, 3


def together(work, items) -> list:
    """`work(item)` in threads that start at the same moment."""
    gate = threading.Barrier(THREADS)

    def late(item):
        gate.wait(timeout=PATIENCE)
        return work(item)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(late, items))


def check_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_a_network_in_several_threads(network) -> None:
    """Each thread its own cloud; forward and backward."""
    clouds = [cloud(seed) for seed in range(THREADS * ROUNDS)]
    expected = [run(network, points, "cpu") for points in clouds]
    assert not torch.equal(expected[0][0][:5], expected[1][0][:5])
    found = together(lambda points: run(network, points, "cpu"), clouds)
    for one, other in zip(found, expected, strict=True):
        check_equal(one, other)


def layers_of(name: str):
    """A function from a sparse tensor to the features behind two layers, and a sparse tensor."""
    coords, x = cloud(99, 2000)
    if name == "spconv":
        import spconv.pytorch as spconv

        net = spconv.SparseSequential(
            spconv.SubMConv3d(4, 8, 3, indice_key="a"), spconv.SubMConv3d(8, 8, 3, indice_key="a")
        )
        shape = [16, 16, 16]
        return lambda t: net(t).features, lambda: spconv.SparseConvTensor(x, coords, shape, 2)
    if name == "torchsparse":
        import torchsparse
        from torchsparse import nn as spnn

        net = torch.nn.Sequential(spnn.Conv3d(4, 8, 3), spnn.Conv3d(8, 8, 3, stride=2))
        return lambda t: net(t).F, lambda: torchsparse.SparseTensor(x, coords)
    import MinkowskiEngine as ME

    net = torch.nn.Sequential(
        ME.MinkowskiConvolution(4, 8, kernel_size=3, dimension=3),
        ME.MinkowskiConvolution(8, 8, kernel_size=2, stride=2, dimension=3),
    )
    return lambda t: net(t).F, lambda: ME.SparseTensor(x, coords)


@pytest.mark.parametrize("name", ["spconv", "torchsparse", "minkowski"])
def test_one_tensor_in_several_threads(name) -> None:
    """All threads need the same kernel maps of the same tensor, none of which exists yet."""
    import sparse_bridge

    with sparse_bridge.enable(name):
        torch.manual_seed(1)
        forward, tensor = layers_of(name)
        with torch.no_grad():
            expected = forward(tensor())
            for _ in range(3):
                shared = tensor()
                for found in together(lambda _, shared=shared: forward(shared), range(THREADS)):
                    assert torch.equal(found, expected)
                assert torch.equal(forward(shared), expected)


def test_enable_in_several_threads() -> None:
    """Handles are counted, and the last one to let go turns the framework off."""
    import sparse_bridge

    def hold(_):
        with sparse_bridge.enable("minkowski") as handle:
            import MinkowskiEngine as ME

            x = ME.SparseTensor(torch.ones(2, 1), torch.tensor([[0, 0, 0], [0, 1, 0]]).int())
            return handle.status()["minkowski"].enabled, len(x)

    held = sparse_bridge.status()["minkowski"].enabled
    assert together(hold, range(THREADS * 4)) == [(True, 2)] * (THREADS * 4)
    assert sparse_bridge.status()["minkowski"].enabled == held
