"""Small networks around the convolutions: everything but the library's own calls is plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class Voxels:
    """Features on a coordinate set, with the neighbour caches that belong to the set."""

    def __init__(self, feats, coords, spatial, batch, caches=None):
        self.feats, self.coords, self.spatial, self.batch = feats, coords, list(spatial), batch
        self.caches = {} if caches is None else caches

    def like(self, feats):
        return Voxels(feats, self.coords, self.spatial, self.batch, self.caches)

    @property
    def shape(self):
        return torch.Size([self.batch, self.feats.shape[1], *self.spatial])


def down(x):
    """2x2x2 blocks into channels; rows of the result ascend by (batch, axes)."""
    half = [(s + 1) // 2 for s in x.spatial]
    c = x.coords.long()
    blocks = torch.cat([c[:, :1], c[:, 1:] // 2], 1)
    parents, row = torch.unique(blocks, dim=0, return_inverse=True)
    slot = (c[:, 1:] % 2 * torch.tensor([1, 2, 4], device=c.device)).sum(1)
    f = x.feats.new_zeros(len(parents) * 8, x.feats.shape[1])
    f = f.index_put((row * 8 + slot,), x.feats)
    y = Voxels(f.reshape(len(parents), -1), parents.int().contiguous(), half, x.batch)
    y.children = (x, row, slot)
    return y


def up(x, y):
    """Channels back into the blocks that `y` was made of."""
    fine, row, slot = y.children
    return fine.like(x.feats.reshape(len(x.feats) * 8, -1)[row * 8 + slot])


def subdivided(x, mask):
    """Channels into those cells of 2x2x2 blocks that a mask selects."""
    row, slot = mask.nonzero(as_tuple=True)
    bits = torch.stack([slot & 1, slot >> 1 & 1, slot >> 2 & 1], 1)
    c = torch.cat([x.coords[row, :1].long(), x.coords[row, 1:].long() * 2 + bits], 1)
    f = x.feats.reshape(len(x.feats) * 8, -1)[row * 8 + slot]
    return Voxels(f, c.int().contiguous(), [s * 2 for s in x.spatial], x.batch)


class Layers:
    """The operations of network cases, as methods `net_<name>` of a case."""

    def weight_of(self, name):
        return self.values.get(f"w:{name}")

    def net_conv(self, x, w, b=None, dilation=(1, 1, 1)):
        """One cache serves every layer of the same kernel and dilation on a coordinate set."""
        weight = self.weight_of(w)
        key = (tuple(weight.shape[1:4]), tuple(dilation))
        conv = self.function("ops.spconv.sparse_submanifold_conv3d")
        bias, cache = self.weight_of(b), x.caches.get(key)
        y, cache = conv(x.feats, x.coords, x.shape, weight, bias, cache, key[1])
        x.caches.setdefault(key, cache)
        return x.like(y)

    def net_strided(self, x, w, stride, padding, spatial, b=None):
        conv = self.function("ops.spconv.sparse_conv3d")
        geometry = (tuple(stride), tuple(padding), (1, 1, 1))
        weights = (self.weight_of(w), self.weight_of(b))
        y, coords, _ = conv(x.feats, x.coords, x.shape, *weights, None, None, *geometry)
        return Voxels(y, coords, spatial, x.batch)

    def net_sample(self, x, grid, mode):
        sample = self.function("ops.grid_sample.grid_sample_3d")
        y = sample(x.feats.contiguous(), x.coords, x.shape, self.values[grid], mode)
        return x.like(y.reshape(-1, y.shape[-1]))

    def net_linear(self, x, w, b=None):
        return x.like(F.linear(x.feats, self.weight_of(w), self.weight_of(b)))

    def net_norm(self, x, w=None, b=None):
        """In float32, and in float64 where the case runs so."""
        wide = torch.promote_types(x.feats.dtype, torch.float32)
        scale, shift = (None if k is None else self.weight_of(k) for k in (w, b))
        scale, shift = (None if t is None else t.to(wide) for t in (scale, shift))
        size = (x.feats.shape[1],)
        y = F.layer_norm(x.feats.to(wide), size, scale, shift, 1e-6)
        return x.like(y.to(x.feats.dtype))

    def net_silu(self, x):
        return x.like(F.silu(x.feats))

    def net_relu(self, x):
        return x.like(F.relu(x.feats))

    def net_gelu(self, x):
        return x.like(F.gelu(x.feats))

    def net_add(self, x, y):
        return x.like(x.feats + y.feats)

    def net_repeat(self, x, times):
        return x.like(x.feats.repeat_interleave(times, 1))

    def net_group_mean(self, x, groups):
        return x.like(x.feats.reshape(len(x.feats), groups, -1).mean(-1))

    def net_down(self, x):
        return down(x)

    def net_up(self, x, y):
        return up(x, y)

    def net_subdivide(self, x, mask):
        return subdivided(x, self.values[mask].bool())

    def net_same_sites(self, x, sites):
        """On the coordinate set of `sites`, so that its caches serve here as well."""
        return sites.like(x.feats)
