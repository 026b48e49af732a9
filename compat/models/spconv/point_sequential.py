"""Pointcept's `Point` and the containers that hand it to sparse layers, plain ones and its own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import spconv.pytorch as spconv
import torch
from torch import nn

from .spunet import offset2batch


class Point(dict):
    """A batch of point clouds: feat, coord, grid_coord, offset, batch and what is derived."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if "batch" not in self:
            self.batch = offset2batch(self.offset)

    def sparsify(self, pad: int = 96) -> None:
        """Attach the sparse tensor of the grid coordinates."""
        shape = torch.add(torch.max(self.grid_coord, dim=0).values, pad).tolist()
        self.sparse_shape = shape
        self.sparse_conv_feat = spconv.SparseConvTensor(
            features=self.feat,
            indices=torch.cat([self.batch.unsqueeze(-1).int(), self.grid_coord.int()], dim=1).contiguous(),
            spatial_shape=shape,
            batch_size=self.batch[-1].tolist() + 1,
        )

    def code(self, axes: Sequence[int] = (0, 1, 2)) -> torch.Tensor:
        """int64 [N], batch index and Morton code of each grid coordinate, the last axis fastest."""
        value = self.batch.long()
        for bit in reversed(range(16)):
            for axis in axes:
                value = value * 2 + ((self.grid_coord[:, axis].long() >> bit) & 1)
        return value


class PointModule(nn.Module):
    """Marks the modules that take a Point."""


class PointSequential(PointModule):
    """Runs each module on what it takes: the Point, its sparse tensor or its features."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__()
        named = args[0] if len(args) == 1 and isinstance(args[0], OrderedDict) else None
        for name, module in (named or dict(enumerate(args))).items():
            self.add_module(str(name), module)
        for name, module in kwargs.items():
            if name in self._modules:
                raise ValueError("name exists.")
            self.add_module(name, module)

    def __getitem__(self, index: int) -> nn.Module:
        return list(self._modules.values())[index]

    def __len__(self) -> int:
        return len(self._modules)

    def add(self, module: nn.Module, name: str | None = None) -> None:
        self.add_module(name or str(len(self._modules)), module)

    def forward(self, x: Any) -> Any:
        for module in self._modules.values():
            if isinstance(module, PointModule):
                x = module(x)
            elif spconv.modules.is_spconv_module(module):
                if isinstance(x, Point):
                    x.sparse_conv_feat = module(x.sparse_conv_feat)
                    x.feat = x.sparse_conv_feat.features
                else:
                    x = module(x)
            elif isinstance(x, Point):
                x.feat = module(x.feat)
                if "sparse_conv_feat" in x:
                    x.sparse_conv_feat = x.sparse_conv_feat.replace_feature(x.feat)
            elif isinstance(x, spconv.SparseConvTensor):
                if x.indices.shape[0] != 0:
                    x = x.replace_feature(module(x.features))
            else:
                x = module(x)
        return x
