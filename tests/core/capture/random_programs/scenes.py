"""Random scenes: boxes, gaps, empty batch items, equal rows, rows outside, and ranges of torchsparse 2.1."""

from __future__ import annotations

import contextlib

import torch

import sparse_bridge
from sparse_bridge import settings
from tests.adapters.standins import standin

NAMES = ("spconv", "torchsparse 2.1", "torchsparse 2.0", "torchsparse 1.4", "minkowski")
RANGES = ("none", "none", "given", "late", "shrinking", "now and then")
LARGEST = 24


@contextlib.contextmanager
def framework(name):
    """Its module, or a release's."""
    if not name.startswith("torchsparse"):
        with settings.override(groups=True), standin(name) as module:
            yield module
        return
    with sparse_bridge.enable("torchsparse", mode="standin", profile=name.split()[1]):
        import torchsparse

        yield torchsparse


def random_rows(choose, items, extents, sizes):
    """Coordinates int32 [N, 4], batch first, in random order."""
    torch.manual_seed(choose.randrange(1 << 30))
    coords = (torch.rand(choose.choice(sizes), 4) * torch.tensor([items, *extents])).int()
    if choose.random() < 0.3:
        coords[:, 1:] //= 3
    if items > 1 and choose.random() < 0.2:
        coords[:, 0] = coords[:, 0].clamp(min=1)  # the first item is empty
    coords = coords.unique(dim=0)
    return coords[torch.randperm(len(coords))]


class Scenes:
    """Scenes of one stream, each a function that makes its tensor anew.

    trains: with rows enough for norms, mostly.  range_kind: how `spatial_range` is given.  irregular: the share of
    scenes with equal rows or rows outside.
    """

    def __init__(self, module, name, choose, device, trains):
        self.module, self.name, self.choose, self.device, self.trains = module, name, choose, device, trains
        self.range_kind = choose.choice(RANGES) if name == "torchsparse 2.1" else "none"
        self.irregular, self.below = choose.choice([0, 0, 0.1, 0.3]), choose.choice([0, 0, 0.3])
        self.items = choose.choice([[1, 2, 3], [2], [3]])
        self.extents = choose.choice([[8, 12, 17, LARGEST], [12], [9, 16]])
        self.width = choose.choice([4, 4, 4, 3, 1])
        self.unit = 2 if name == "minkowski" and choose.random() < 0.15 else 1  # the tensor stride of inputs

    def __repr__(self):
        said = {"range": self.range_kind, "irregular": self.irregular, "below 0": self.below, "unit": self.unit}
        return f"scenes of {said}, items {self.items}, extents {self.extents}"

    def probe(self):
        """Many rows from corner to corner, as far as scenes go."""
        extents = [max(self.extents)] * 3
        rows = random_rows(self.choose, 2, extents, [120])
        corners = rows.new_tensor([[0, 0, 0, 0], [1, *(extent - 1 for extent in extents)]])
        return self.made(torch.cat([corners, rows]).unique(dim=0), extents, 2, (3, *extents), torch.float32)

    def scene(self, number, dtype, grad=False):
        """grad: whether features require a gradient."""
        choose = self.choose
        extents, items = [choose.choice(self.extents) for _ in range(3)], choose.choice(self.items)
        sizes = (40, 60, 120, 300) if self.trains and choose.random() < 0.9 else (1, 2, 9, 40, 120, 300)
        coords = random_rows(choose, items, extents, sizes)
        if self.name != "spconv" and self.range_kind == "none" and choose.random() < self.below:
            coords[:, 1:] -= 5
        if choose.random() < self.irregular and len(coords) > 4:
            if choose.random() < 0.5:
                coords[2] = coords[1]
            else:
                coords[3, choose.choice([1, 2, 3])] = LARGEST + 6
        most = [max(self.extents) + 7] * 3
        shrunk = [max(self.extents) + 12 - 3 * (number // 5)] * 3
        limits = {"given": most, "late": most if number > 6 else None, "shrinking": shrunk}
        if self.range_kind == "now and then":
            limits["now and then"] = choose.choice([None, most, most])
        limit = limits.get(self.range_kind)
        return self.made(coords, extents, items, None if limit is None else (3, *limit), dtype, grad)

    def made(self, coords, extents, items, limits, dtype, grad=False):
        module, coords = self.module, coords.to(self.device)
        values = torch.randn(len(coords), self.width).to(self.device, dtype)
        leaf = (lambda: values.clone().requires_grad_()) if grad else (lambda: values)
        if self.name == "spconv":
            return lambda: module.SparseConvTensor(leaf(), coords.clone(), list(extents), items)
        if self.name == "minkowski":
            coords[:, 1:] *= self.unit
            return lambda: module.SparseTensor(leaf(), coords.clone(), tensor_stride=self.unit)
        if self.name != "torchsparse 2.1":
            coords = coords[:, [1, 2, 3, 0]].contiguous()
            return lambda: module.SparseTensor(leaf(), coords.clone())
        limits = None if self.range_kind == "none" else limits
        return lambda: module.SparseTensor(leaf(), coords.clone(), 1, limits)
