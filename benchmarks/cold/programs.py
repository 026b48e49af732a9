"""First calls in dry runs: FlexGEMM's function on a shell, and scenes through spconv."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

import sparse_bridge
from sparse_bridge.tools.demo.voxels import street_voxels
from sparse_bridge.tools.networks.spconv import ResidualUNet, Second

from .dry_run import DryRun, dry_run

NETWORKS = {"unet": ResidualUNet, "second": Second}
Call = Callable[[], torch.Tensor]


def shell(size: int) -> torch.Tensor:
    """int32 [N, 4]: the voxels of a sphere's surface in a grid of `size`, 1.25 voxels thick."""
    axes = torch.meshgrid(*[torch.arange(size)] * 3, indexing="ij")
    cells = torch.stack(axes, -1).reshape(-1, 3)
    distance = (cells + 0.5 - size / 2).square().sum(1).sqrt()
    cells = cells[(distance <= size / 2) & (distance >= size / 2 - 1.25)]
    return torch.cat([cells.new_zeros(len(cells), 1), cells], 1).int()


@contextlib.contextmanager
def _api(arch: str, framework: str) -> Iterator[DryRun]:
    with dry_run(arch) as found, sparse_bridge.enable(framework, mode="standin"):
        yield found


def flex_gemm(arch: str, channels: int, size: int, train: bool) -> DryRun:
    """`sparse_submanifold_conv3d` in fp16 on a shell: without gradients, then, if it is to `train`,
    a second call with gradients and its backward pass."""
    with _api(arch, "flex_gemm") as found:
        from flex_gemm.ops.spconv import sparse_submanifold_conv3d

        coords, shape = shell(size), torch.Size([1, channels, *[size] * 3])
        x, weight, bias = (
            torch.zeros(size, dtype=torch.float16)
            for size in ((len(coords), channels), (channels, 3, 3, 3, channels), (channels,))
        )
        found.part = "forward"
        with torch.no_grad():
            _, cache = sparse_submanifold_conv3d(x, coords, shape, weight, bias)
        if train:
            given = [one.requires_grad_() for one in (weight, bias)]
            y, _ = sparse_submanifold_conv3d(x.requires_grad_(), coords, shape, *given, cache)
            found.part = "backward"
            y.sum().backward()
    return found


def scenes(arch: str, network: str, sizes: Sequence[int], train: bool) -> DryRun:
    """A network of spconv's on street scans of these numbers of voxels, each of another shape: fp16
    inference, or training steps under autocast."""
    with _api(arch, "spconv") as found:
        import spconv.pytorch as sp

        torch.manual_seed(0)
        model = NETWORKS[network](sp)
        model = model.train() if train else model.half().eval()
        for turn, size in enumerate(sizes):
            coords, shape, batch = street_voxels(size)
            if network == "unet":
                shape = tuple(side + 16 * turn for side in shape)
            x = torch.randn(len(coords), 4)
            found.part = f"scene {turn + 1}"
            with torch.set_grad_enabled(train), torch.autocast("cuda", enabled=train):
                x = sp.SparseConvTensor(x if train else x.half(), coords, list(shape), batch)
                y = model(x)
                y = getattr(y, "features", y)
            if train:
                y.float().square().mean().backward()
    return found
