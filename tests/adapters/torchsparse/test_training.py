"""What training frameworks do with layers: norms, replicas, autocast, checkpointing, gradcheck."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from sparse_bridge.errors import DataTypeError
from tests import checks

from . import networks
from .conftest import DEVICES, speaking
from .test_conv import points


def network(ts):
    spnn = ts.nn
    return nn.Sequential(
        spnn.Conv3d(4, 6, 3, bias=True),
        spnn.BatchNorm(6),
        spnn.ReLU(True),
        spnn.Conv3d(6, 6, 2, stride=2),
        spnn.BatchNorm(6),
        spnn.Conv3d(6, 5, 2, stride=2, transposed=True),
        spnn.Conv3d(5, 3, 1, bias=True),
    )


def tensor(ts, dtype=torch.float32, device="cpu", channels=4, seed=0):
    coords = points(ts.release, seed=seed)
    feats = torch.randn(len(coords), channels).to(device, dtype)
    return ts.SparseTensor(feats, coords.to(device))


def test_sync_batch_norm(ts):
    """torch's converter replaces BatchNorm by a layer that then gets a sparse tensor."""
    net = network(ts)
    x = tensor(ts)
    want = copy.deepcopy(net)(ts.SparseTensor(x.F, x.C)).F
    original = nn.SyncBatchNorm.forward
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    assert isinstance(converted[1], nn.SyncBatchNorm) and isinstance(converted[4], nn.SyncBatchNorm)
    y = converted(ts.SparseTensor(x.F, x.C))
    torch.testing.assert_close(y.F, want)
    y.F.sum().backward()
    assert converted[0].kernel.grad is not None and y.C is not None
    dense = torch.randn(8, 6)
    torch.testing.assert_close(converted[1](dense), nn.BatchNorm1d(6)(dense))
    assert nn.SyncBatchNorm.forward is original


def test_sync_batch_norm_is_left_alone_afterwards():
    before = nn.SyncBatchNorm.forward
    with speaking("2.1"):
        assert nn.SyncBatchNorm.forward is not before
    assert nn.SyncBatchNorm.forward is before


def _rank(rank, path, results):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    try:
        with speaking("2.1") as ts:
            ts.release = "2.1"
            torch.manual_seed(0)
            net = nn.parallel.DistributedDataParallel(network(ts))
            torch.manual_seed(rank)
            x = tensor(ts, seed=rank)
            net(x).F.square().mean().backward()
            results.put((rank, net.module[0].kernel.grad.numpy()))
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_distributed_data_parallel(tmp_path):
    """Two processes end with the same averaged gradient."""
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    path = tmp_path / "store"
    workers = [context.Process(target=_rank, args=(r, path, results)) for r in range(2)]
    for worker in workers:
        worker.start()
    found = dict(results.get() for _ in workers)
    for worker in workers:
        worker.join()
    assert (found[0] == found[1]).all() and abs(found[0]).max() > 0


def test_replicas(ts):
    """`DataParallel` makes shallow copies whose parameters are plain tensors."""
    net = network(ts).eval()
    x = tensor(ts)
    want = net(ts.SparseTensor(x.F, x.C)).F

    def replica(module):
        clone = module._replicate_for_data_parallel()
        for name, parameter in module._parameters.items():
            if parameter is None:
                clone._parameters[name] = None
            else:
                setattr(clone, name, parameter.detach().clone().requires_grad_())
        for name, buffer in module._buffers.items():
            setattr(clone, name, buffer)
        for name, child in module._modules.items():
            setattr(clone, name, replica(child))
        return clone

    clone = replica(net)
    assert not isinstance(clone[0].kernel, nn.Parameter)
    y = clone(ts.SparseTensor(x.F, x.C))
    assert torch.equal(y.F, want)
    y.F.sum().backward()
    assert clone[0].kernel.grad is not None and net[0].kernel.grad is None


def test_copies_and_modes(ts):
    net = network(ts)
    clone = copy.deepcopy(net).eval()
    assert clone[0].kernel is not net[0].kernel and not clone[0].training
    assert net.half()[0].kernel.dtype == torch.float16
    assert net.double()[0].kernel.dtype == torch.float64


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast(ts, dtype, device):
    """Layers run in the autocast dtype, parameters keep theirs, and so do their gradients."""
    net = network(ts).to(device)
    x = tensor(ts, device=device)
    leaf = x.F.clone().requires_grad_()
    with torch.autocast(device, dtype):
        hidden = net[:1](ts.SparseTensor(leaf, x.C))
        assert hidden.F.dtype == dtype
        y = net(ts.SparseTensor(leaf, x.C))
    assert y.F.dtype == dtype
    y.F.float().square().sum().backward()
    assert leaf.grad.dtype == torch.float32 and net[0].kernel.grad.dtype == torch.float32
    clone = copy.deepcopy(net).float()
    clone.zero_grad()
    want_leaf = x.F.clone().requires_grad_()
    want = clone(ts.SparseTensor(want_leaf, x.C))
    want.F.square().sum().backward()
    limit = 0.05 if dtype == torch.float16 else 0.2
    for got, other in ((y.F, want.F), (leaf.grad, want_leaf.grad), (net[0].kernel.grad, clone[0].kernel.grad)):
        error = (got.float() - other).pow(2).mean().sqrt() / other.pow(2).mean().sqrt()
        assert error < limit


def test_autocast_of_points(ts):
    """Coordinates averaged under autocast keep their precision; torchsparse rounds them to half."""
    F = ts.nn.functional
    coords = torch.tensor([[4097.0, 3.0], [4097.0, 5.0]])
    index, counts = torch.tensor([0, 0]), torch.tensor([2], dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        assert F.spvoxelize(coords, index, counts).tolist() == [[4097.0, 4.0]]


@pytest.mark.parametrize("kernel, stride", [(3, 1), (2, 2), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_decides_in_2_1(ts21, kernel, stride, dtype):
    """Either operand in half precision makes the layer run so; parameters' gradients stay
    theirs."""
    ts21.release = "2.1"
    conv = ts21.nn.Conv3d(4, 5, kernel, stride=stride, bias=True)
    x = tensor(ts21, dtype)
    y = conv(x)
    assert y.F.dtype == dtype
    y.F.float().sum().backward()
    assert conv.kernel.grad.dtype == torch.float32 == conv.bias.grad.dtype
    assert conv.to(dtype)(tensor(ts21)).F.dtype == dtype
    with pytest.raises(DataTypeError):
        conv(tensor(ts21, torch.float64))


@pytest.mark.parametrize("kernel", [3, 1])
def test_mixed_precision_is_refused_before_2_1(ts14, kernel):
    ts14.release = "1.4"
    conv = ts14.nn.Conv3d(4, 5, kernel)
    with pytest.raises(TypeError, match="float16"):
        conv(tensor(ts14, torch.float16))
    assert conv.half()(tensor(ts14, torch.float16)).F.dtype == torch.float16


@pytest.mark.sample(2)
@pytest.mark.parametrize("kernel, stride", [(3, 1), (2, 2), (3, 2), (2, 1), (1, 1)])
def test_gradcheck(ts, kernel, stride):
    F, coords = ts.nn.functional, points(ts.release, shape=(3, 3, 4), batch=1, share=0.4)
    x = torch.randn(len(coords), 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(kernel**3, 2, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def layer(x, weight, bias):
        y = F.conv3d(ts.SparseTensor(x, coords), weight, kernel, bias, stride=stride)
        return F.conv3d(y, weight.transpose(1, 2), kernel, stride=stride, transposed=True).F

    assert torch.autograd.gradcheck(layer, (x, weight, bias))


def test_checkpointed_blocks(ts):
    net = network(ts).double().eval()
    x = tensor(ts, torch.float64)
    grads = []
    for checkpointed in (False, True):
        net.zero_grad()
        leaf = x.F.clone().requires_grad_()
        start = ts.SparseTensor(leaf * 1, x.C)
        if checkpointed:
            y = torch.utils.checkpoint.checkpoint(lambda s: net(s).F, start, use_reentrant=False)
        else:
            y = net(start).F
        y.square().sum().backward()
        grads.append((leaf.grad, net[0].kernel.grad.clone()))
    for one, other in zip(*grads, strict=True):
        checks.assert_close(one, other, torch.float64)


def test_training_reduces_the_loss(ts):
    """The example of torchsparse: labels by row, through down and up, with an optimiser."""
    net = network(ts)
    x = tensor(ts)
    labels = (x.C[:, 1] % 3).long()
    optimiser = torch.optim.Adam(net.parameters(), 0.02)
    losses = []
    for _ in range(25):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(net(ts.SparseTensor(x.F, x.C)).F, labels)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_empty_and_single_rows(ts):
    net = network(ts).eval()
    coords = points(ts.release)
    for n in (0, 1):
        x = torch.randn(n, 4, requires_grad=True)
        y = net(ts.SparseTensor(x, coords[:n].contiguous()))
        assert y.F.shape == (n, 3) and torch.equal(y.C, coords[:n])
        y.F.sum().backward()
        assert x.grad.shape == (n, 4)
    points_, feats = torch.zeros(0, 4), torch.zeros(0, 4)
    if ts.release == "1.4":
        assert networks.OldSPVCNN(ts).eval()(points_, feats).shape == (0, 5)


def test_two_threads(ts):
    """Data-parallel workers share modules and run at once."""
    import threading

    net = network(ts).eval()
    inputs = [tensor(ts, seed=s) for s in range(4)]
    want = [net(ts.SparseTensor(x.F, x.C)).F for x in inputs]
    got: dict = {}

    def work(i):
        for _ in range(3):
            got[i] = net(ts.SparseTensor(inputs[i].F, inputs[i].C)).F

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(got[i], want[i]) for i in range(4))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_collating_in_loader_workers(ts):
    from torch.utils.data import DataLoader

    coords = points(ts.release)[:, 1:] if ts.release == "2.1" else points(ts.release)[:, :3]
    data = [{"x": ts.SparseTensor(torch.randn(4, 2).numpy(), coords[i : i + 4].numpy())} for i in range(4)]
    loader = DataLoader(
        data, batch_size=2, num_workers=1, collate_fn=ts.utils.collate.sparse_collate_fn, multiprocessing_context="fork"
    )
    batches = [batch["x"] for batch in loader]
    assert len(batches) == 2 and all(b.C.shape == (8, 4) for b in batches)
    column = batches[0].C[:, 0 if ts.release == "2.1" else 3]
    assert column.tolist() == [0] * 4 + [1] * 4
    assert ts.nn.Conv3d(2, 3, 3)(batches[0]).F.shape == (8, 3)
