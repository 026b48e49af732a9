"""Random sparse inputs."""

from __future__ import annotations

import torch


def cloud(shape, batch_size=2, share=0.3, seed=0, device="cpu", empty_items=()):
    """Distinct coordinates int32 [N, 1 + D] in random order; items in `empty_items` have none."""
    generator = torch.Generator().manual_seed(seed)
    occupied = torch.rand((batch_size, *shape), generator=generator) < share
    for item in empty_items:
        occupied[item] = False
    coords = occupied.nonzero().int()
    return coords[torch.randperm(len(coords), generator=generator)].contiguous().to(device)


def features(n, channels, seed=0, dtype=torch.float32, device="cpu"):
    """Normal features [n, channels], rounded to `dtype`."""
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randn(n, channels, generator=generator).to(dtype).to(device)


def weight(c_out, kernel, c_in, seed=0, dtype=torch.float32, device="cpu"):
    """A weight [c_out, *kernel, c_in] scaled to keep activations near 1."""
    generator = torch.Generator().manual_seed(seed + 2)
    volume = 1
    for k in kernel:
        volume *= k
    value = torch.randn(c_out, *kernel, c_in, generator=generator) / (volume * c_in) ** 0.5
    return value.to(dtype).to(device)


def densify(x, coords, batch_size, shape):
    """[N, C] at distinct coordinates -> dense [B, C, *shape], differentiable."""
    dense = x.new_zeros((batch_size, *shape, x.shape[1]))
    dense = dense.index_put(tuple(coords.long().t()), x)
    return dense.permute(0, -1, *range(1, len(shape) + 1))


def sample(dense, coords):
    """Dense [B, C, *shape] -> rows [N, C] at the coordinates."""
    return dense.permute(0, *range(2, dense.ndim), 1)[tuple(coords.long().t())]
