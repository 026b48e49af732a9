"""torch's SyncBatchNorm on CPUs, where torch refuses it: the same statistics, joined through gloo.

Without GPUs, too, the conversions, containers and adapters around that layer can be tried, and the
losses of ranks compared with those of one process.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel

__all__ = ["SpreadOnCpus", "join_on_cpus"]


def join_on_cpus() -> None:
    """In this process, from now on. Call it before `sparse_bridge.enable()`, which wraps torch's
    layer for torchsparse's tensors and must wrap this one."""
    of_torch = nn.SyncBatchNorm.forward

    def forward(self: nn.SyncBatchNorm, input: torch.Tensor) -> torch.Tensor:
        alone = not self.training or not dist.is_initialized() or dist.get_world_size(self.process_group) == 1
        if alone or input.device.type != "cpu":
            return of_torch(self, input)
        y, mean, variance, rows = _Joint.apply(input, self.weight, self.bias, self.eps, self.process_group)
        if self.track_running_stats:
            self.num_batches_tracked += 1
            share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.to(self.running_mean), share)
            unbiased = variance * (rows / (rows - 1).clamp(min=1))
            self.running_var.lerp_(unbiased.to(self.running_var), share)
        return y

    nn.SyncBatchNorm.forward = forward


class SpreadOnCpus(DistributedDataParallel):
    """DDP that lets SyncBatchNorm through on CPUs."""

    def _passing_sync_batchnorm_handle(self, module: nn.Module) -> None:
        """torch's method refuses the layer there, and does nothing else."""


class _Joint(torch.autograd.Function):
    """One sum over ranks per pass, as torch has it; in double precision."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, group: Any) -> Any:
        work, channels = x.detach().double(), x.shape[1]
        sums = torch.cat([work.sum(0), work.square().sum(0), work.new_tensor([float(len(x))])])
        dist.all_reduce(sums, group=group)
        rows = sums[-1]
        mean, square = (sums[:-1] / rows.clamp(min=1)).split(channels)
        variance = (square - mean.square()).clamp(min=0)
        scale = (variance + eps).rsqrt()
        y = (work - mean) * scale
        if weight is not None:
            y = y * weight + bias
        ctx.save_for_backward(x, weight, mean, scale, rows)
        ctx.group = group
        ctx.mark_non_differentiable(mean, variance, rows)
        return y.to(x.dtype), mean, variance, rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
        x, weight, mean, scale, rows = ctx.saved_tensors
        normed, dy = (x.double() - mean) * scale, grad.double()
        own = torch.stack([dy.sum(0), (dy * normed).sum(0)])
        sums = own.clone()
        dist.all_reduce(sums, group=ctx.group)
        if not len(x):
            return None, None, None, None, None  # as torch's layer
        plain, along = sums / rows
        dx = (dy - plain - normed * along) * scale
        if weight is None:
            return dx.to(x.dtype), None, None, None, None
        return (dx * weight).to(x.dtype), own[1].to(weight.dtype), own[0].to(weight.dtype), None, None
