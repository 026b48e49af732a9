"""One of two ranks: torch's own engines around the networks of every framework.

python -m tests.scale_out.ranks FOLDER cpu|cuda      (RANK, WORLD_SIZE ... as torchrun sets them)

Every rank writes `rank<N>.json`: a line per check, empty where it held. The ranks run the same
checks in the same order; each has a cloud of its own, with another number of rows.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.utils.checkpoint import checkpoint

import sparse_bridge
from benchmarks.scale_out.joint_norm import join_on_cpus
from tests.patience import PATIENCE

from .networks import NETWORKS
from .rank_tools import (
    Points,
    check_equal,
    check_same_on_all_ranks,
    ddp,
    gradients,
    joint,
    loss_of,
    mean_of,
    of,
    own_gradients,
    start_group,
    synchronised,
    with_joint_statistics,
    with_norms,
)

CHECKS: dict[str, Callable[[nn.Module, int, torch.device, Path], None]] = {}


def check(function: Callable[[nn.Module, int, torch.device, Path], None]):
    CHECKS[function.__name__] = function
    return function


@check
def mean_of_single_gradients(network, rank, device, _) -> None:
    spread = ddp(network, device)
    loss_of(spread(*of(rank, device))).backward()
    both = [own_gradients(network, of(r, device)) for r in (0, 1)]
    check_equal(gradients(spread), mean_of(*both))


def train_beside(spread, alone, optimizers, rank, device) -> None:
    """Three steps of two ranks, and of one process that adds up both losses."""
    for step in range(3):
        loss_of(spread(*of(rank, device, step))).backward()
        for r in (0, 1):
            (loss_of(alone(*of(r, device, step))) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@check
def weights_after_steps(network, rank, device, _) -> None:
    """Two ranks, and one process that adds up both losses."""
    spread, alone = ddp(network, device), copy.deepcopy(network)
    both = [torch.optim.SGD(m.parameters(), 1e-2, momentum=0.9) for m in (spread, alone)]
    train_beside(spread, alone, both, rank, device)
    check_same_on_all_ranks(spread)
    check_equal(list(spread.parameters()), list(alone.parameters()))
    assert not torch.equal(next(spread.parameters()), next(network.parameters()))


@check
def accumulation_without_synchronisation(network, rank, device, _) -> None:
    spread = ddp(network, device)
    with spread.no_sync():
        loss_of(spread(*of(rank, device, 0))).backward()
    first = own_gradients(network, of(rank, device, 0))
    check_equal(gradients(spread), first)  # of this rank alone
    loss_of(spread(*of(rank, device, 1))).backward()
    both = [own_gradients(network, of(r, device, 0), of(r, device, 1)) for r in (0, 1)]
    check_equal(gradients(spread), mean_of(*both))


@check
def scaler_skips_a_step_on_all_ranks(network, rank, device, _) -> None:
    """One rank's features overflow: nobody takes the step, and the scale is halved everywhere."""
    spread = ddp(network, device)
    optimizer = torch.optim.SGD(spread.parameters(), 1e-2)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    taken = []
    for step in range(3):
        before = [p.detach().clone() for p in spread.parameters()]
        coords, x = of(rank, device, step)
        if step == 1 and rank == 1:
            x = x * float("inf")
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype):
            y = spread(coords, x)
        scaler.scale(loss_of(y.float())).backward()
        scaler.step(optimizer)
        scaler.update()
        pairs = zip(before, spread.parameters(), strict=True)
        taken.append(not all(torch.equal(a, b) for a, b in pairs))
    assert taken == [True, False, True] and scaler.get_scale() == 2.0**9, (taken, scaler.get_scale())
    check_same_on_all_ranks(spread)


class _Checkpointed(nn.Module):
    """Forgets what is inside, and runs it again in backward; sparse tensors go in and out."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


@check
def activation_checkpoints(network, rank, device, _) -> None:
    saving = copy.deepcopy(network)
    if hasattr(saving, "net"):
        saving.net = _Checkpointed(saving.net)
        spread = ddp(saving, device)
        loss_of(spread(*of(rank, device))).backward()
    else:
        spread = ddp(saving, device)
        loss_of(checkpoint(spread, *of(rank, device), use_reentrant=False)).backward()
    both = [own_gradients(network, of(r, device)) for r in (0, 1)]
    check_equal(gradients(spread), mean_of(*both))


class _Headed(nn.Module):
    """A head that not every rank uses in a step."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.head = network, nn.Linear(8, 8)

    def forward(self, coords: torch.Tensor, x: torch.Tensor, use: bool) -> torch.Tensor:
        y = self.network(coords, x)
        return self.head(y) if use else y


@check
def unused_parameters(network, rank, device, _) -> None:
    torch.manual_seed(3)
    headed = _Headed(copy.deepcopy(network)).to(device)
    spread = ddp(headed, device, find_unused_parameters=True)
    alone = [copy.deepcopy(headed) for _ in (0, 1)]
    for step in range(2):
        spread.zero_grad()
        loss_of(spread(*of(rank, device, step), use=rank == 0)).backward()
        for r, one in enumerate(alone):
            one.zero_grad()
            loss_of(one(*of(r, device, step), use=r == 0)).backward()
        both = [[torch.zeros_like(p) if p.grad is None else p.grad for p in one.parameters()] for one in alone]
        check_equal(gradients(spread), mean_of(*both))


@check
def an_empty_scene_on_one_rank(network, rank, device, _) -> None:
    """Whose norms take part in the gradients, too."""
    normed = with_norms(network) if hasattr(network, "net") else network
    spread = ddp(normed, device)
    for full in (0, 1, 0):
        spread.zero_grad()
        points = of(rank, device, rows=None if rank == full else 0)
        y = spread(*points)
        assert len(y) == (0 if rank != full else len(points[0]))
        loss_of(y).backward()
        expected = [g / 2 for g in own_gradients(normed, of(full, device))]
        check_equal(gradients(spread), expected)


@check
def ranks_that_end_at_other_steps(network, rank, device, _) -> None:
    spread = ddp(network, device)
    optimizer = torch.optim.SGD(spread.parameters(), 1e-2)
    with Join([spread]):
        for step in range(4 if rank == 0 else 1):
            optimizer.zero_grad()
            loss_of(spread(*of(rank, device, step))).backward()
            optimizer.step()
    check_same_on_all_ranks(spread)
    assert not torch.equal(next(spread.parameters()), next(network.parameters()))


@check
def sharded_parameters(network, rank, device, folder) -> None:
    """FSDP2 takes the steps of one process, and saves what one process can load."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shards = fully_shard(copy.deepcopy(network), mesh=init_device_mesh(device.type, (2,)))
    assert all(p.to_local().numel() < p.numel() for p in shards.parameters() if p.shape[0] > 1)
    alone = copy.deepcopy(network)
    both = [torch.optim.Adam(m.parameters(), 1e-2) for m in (shards, alone)]
    train_beside(shards, alone, both, rank, device)
    whole = get_model_state_dict(shards, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        check_equal([whole[n] for n, _ in alone.named_parameters()], list(alone.parameters()))
    model, optimizer = get_state_dict(shards, both[0])
    path = folder / type(network).__name__.lower()
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    if rank == 0:
        states = [both[1].state[p] for p in alone.parameters()]
        moments = [s[name].cpu() for s in states for name in ("exp_avg", "exp_avg_sq")]
        torch.save({"model": alone.cpu().state_dict(), "moments": moments}, f"{path}.pt")


@check
def joint_statistics(network, rank, device, _) -> None:
    """SyncBatchNorm over sparse features. torch has it on GPUs only and says so on a CPU, where
    `join_on_cpus` stands for it."""
    if not hasattr(network, "net"):
        return
    normed = with_norms(network)
    synced = synchronised(copy.deepcopy(normed))
    assert any(isinstance(m, nn.SyncBatchNorm) for m in synced.modules())
    assert synced.state_dict().keys() == normed.state_dict().keys()
    if device.type == "cpu":
        with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
            ddp(synced, device)
    for rows in ((None, None), (None, 0), (0, None)):
        _check_joint(copy.deepcopy(normed), rank, device, rows)


def _check_joint(normed: nn.Module, rank: int, device: torch.device, rows) -> None:
    """Sums of two parts are rounded otherwise than one sum: a tolerance."""
    synced = with_joint_statistics(normed, device)
    y = synced(*of(rank, device, rows=rows[rank]))
    weight = torch.linspace(-1, 1, 8, device=device)
    ((y * weight).square().sum() * 2).backward()  # DDP takes the mean over two ranks
    expected = normed(*joint(device, rows))
    (expected * weight).square().sum().backward()
    close = {"rtol": 1e-4, "atol": 1e-4}
    first = len(of(0, device, rows=rows[0])[0])
    own = expected[:first] if rank == 0 else expected[first:]
    torch.testing.assert_close(y, own, **close)
    # A bias in front of a norm has no gradient but what rounding leaves of the others'.
    largest = max(float(gradient.abs().max()) for gradient in gradients(normed))
    for one, other in zip(gradients(synced), gradients(normed), strict=True):
        atol = 1e-3 * float(other.abs().max()) + 1e-6 * largest
        torch.testing.assert_close(one, other, rtol=1e-3, atol=atol)
    for one, other in zip(synced.buffers(), normed.buffers(), strict=True):
        torch.testing.assert_close(one, other, **close)
    synced.eval(), normed.eval()
    torch.testing.assert_close(synced.module(*joint(device, rows)), normed(*joint(device, rows)), **close)


@check
def losses_with_joint_statistics(network, rank, device, _) -> None:
    """Those of one process that has both clouds in one batch. Statistics of each rank alone, which
    must not pass, change them by more than the bound."""
    if not hasattr(network, "net"):
        return
    normed = with_norms(network)

    def points(seed: int) -> Points:
        coords, x = of(rank, device, seed)
        return coords, x * (1.0, 3.0)[rank]

    alone = _losses(copy.deepcopy(normed), device, lambda seed: joint(device, seed=seed, scale=3.0), ranks=1)
    joined, own = (
        max(abs(one - other) / other for one, other in zip(losses, alone, strict=True))
        for losses in (
            _losses(spread, device, points, ranks=2)
            for spread in (with_joint_statistics(normed, device), ddp(normed, device))
        )
    )
    assert joined < 1e-5 and own > 1e-4, (joined, own)
    assert alone[-1] < 0.99 * alone[0], alone


def _losses(model: nn.Module, device: torch.device, points, ranks: int) -> list[float]:
    """Of a training towards ones; the mean over the rows of all ranks."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9), []
    for step in range(8):
        optimizer.zero_grad()
        y = model(*points(step % 4))
        both = torch.stack([(y - 1).square().sum(), y.new_tensor(float(y.numel()))])
        joined = both.detach().clone()
        if ranks > 1:
            dist.all_reduce(joined)
        (both[0] * ranks / joined[1]).backward()
        optimizer.step()
        losses.append(float(joined[0] / joined[1]))
    return losses


def main(folder: Path, device: torch.device) -> None:
    rank = int(os.environ["RANK"])
    if device.type == "cpu":
        join_on_cpus()
    sparse_bridge.enable("spconv", "torchsparse", "minkowski")
    importlib.import_module("torchsparse").backends.allow_tf32 = False  # one answer for any number of ranks
    # A rank that fails leaves the other in a collective.
    device = start_group(rank, device, PATIENCE if device.type == "cpu" else PATIENCE / 6)
    results = {}
    for name, make in NETWORKS.items():
        torch.manual_seed(0)
        network = make().to(device)
        for title, function in CHECKS.items():
            results[f"{name}-{title}"] = ""
            try:
                function(network, rank, device, folder)
            except Exception:  # the report of a check that failed
                results[f"{name}-{title}"] = traceback.format_exc()
                print(f"{name}-{title}", traceback.format_exc(), flush=True)
            (folder / f"rank{rank}.json").write_text(json.dumps(results))
    with contextlib.suppress(RuntimeError):  # a check that failed may have ended the group
        dist.barrier()
    dist.destroy_process_group()
    gc.collect()  # DDP is part of a cycle; gloo's threads must end before Python does


if __name__ == "__main__":
    main(Path(sys.argv[1]), torch.device(sys.argv[2]))
