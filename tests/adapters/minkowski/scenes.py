"""Random voxels, and convolution by dictionary look-up in float64."""

from __future__ import annotations

import torch

from tests.clouds import cloud


def scene(dimension, channels=3, seed=0, dtype=torch.float64):
    """Random voxels of negative and positive coordinates, rows in random order."""
    extent = {1: 40, 2: 9, 3: 6, 4: 4, 5: 3, 6: 3}[dimension]
    share = {1: 0.5, 2: 0.4, 3: 0.3, 4: 0.25, 5: 0.2, 6: 0.08}[dimension]
    coords = cloud((extent,) * dimension, 2, share, seed)
    coords[:, 1:] -= extent // 2
    generator = torch.Generator().manual_seed(seed)
    return coords, torch.randn(len(coords), channels, generator=generator, dtype=dtype)


def by_site(x):
    return {tuple(site): row for site, row in zip(x.C.tolist(), x.F, strict=True)}


def lookup_conv(coords, feats, kernel, offsets, out_sites):
    """y(u) = sum of x(u + o) @ kernel[o]."""
    rows = {tuple(site): feats[i] for i, site in enumerate(coords.tolist())}
    found = []
    for b, *u in out_sites:
        y = feats.new_zeros(kernel.shape[-1])
        for k, o in enumerate(offsets):
            x = rows.get((b, *(c + d for c, d in zip(u, o, strict=True))))
            y = y if x is None else y + x @ kernel[k]
        found.append(y)
    return torch.stack(found)
