"""Rows that share a coordinate, reduced to one."""

import torch
from spconv import pytorch as spconv  # noqa: F401 - the name is upstream's
from spconv.pytorch.modules import SparseModule


class RemoveDuplicate(SparseModule):
    """Keeps the first row of every coordinate, in input order, with no kernel maps."""

    def forward(self, x):
        _, inverse = torch.unique(x.indices, dim=0, return_inverse=True)
        rows = torch.arange(inverse.shape[0], device=inverse.device)
        first = torch.full((int(inverse.max()) + 1 if len(rows) else 0,), len(rows), device=inverse.device)
        first.scatter_reduce_(0, inverse, rows, "amin")
        return x.select_by_index(torch.sort(first).values)
