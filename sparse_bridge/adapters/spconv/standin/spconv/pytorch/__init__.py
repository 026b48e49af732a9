"""The namespace that models import as `spconv`."""

import platform
from pathlib import Path
from typing import Union

import numpy as np
import torch
from spconv.core import ConvAlgo
from spconv.pytorch import (
    constants,
    conv,
    core,
    cppcore,
    functional,
    hash,
    identity,
    modules,
    ops,
    pool,
    spatial,
    tables,
    utils,
)
from spconv.pytorch.conv import (
    SparseConv1d,
    SparseConv2d,
    SparseConv3d,
    SparseConv4d,
    SparseConvTranspose1d,
    SparseConvTranspose2d,
    SparseConvTranspose3d,
    SparseConvTranspose4d,
    SparseInverseConv1d,
    SparseInverseConv2d,
    SparseInverseConv3d,
    SparseInverseConv4d,
    SubMConv1d,
    SubMConv2d,
    SubMConv3d,
    SubMConv4d,
)
from spconv.pytorch.core import SparseConvTensor
from spconv.pytorch.identity import Identity
from spconv.pytorch.modules import (
    SparseBatchNorm,
    SparseIdentity,
    SparseModule,
    SparseReLU,
    SparseSequential,
    assign_name_for_sparse_modules,
)
from spconv.pytorch.pool import (
    SparseAvgPool1d,
    SparseAvgPool2d,
    SparseAvgPool3d,
    SparseGlobalAvgPool,
    SparseGlobalMaxPool,
    SparseMaxPool1d,
    SparseMaxPool2d,
    SparseMaxPool3d,
    SparseMaxPool4d,
)
from spconv.pytorch.tables import AddTable, ConcatTable, JoinTable

from sparse_bridge.adapters.spconv.tensors import expect_sparse

__all__ = [
    "AddTable",
    "ConcatTable",
    "ConvAlgo",
    "Identity",
    "JoinTable",
    "Path",
    "RemoveGrid",
    "SparseAvgPool1d",
    "SparseAvgPool2d",
    "SparseAvgPool3d",
    "SparseBatchNorm",
    "SparseConv1d",
    "SparseConv2d",
    "SparseConv3d",
    "SparseConv4d",
    "SparseConvTensor",
    "SparseConvTranspose1d",
    "SparseConvTranspose2d",
    "SparseConvTranspose3d",
    "SparseConvTranspose4d",
    "SparseGlobalAvgPool",
    "SparseGlobalMaxPool",
    "SparseIdentity",
    "SparseInverseConv1d",
    "SparseInverseConv2d",
    "SparseInverseConv3d",
    "SparseInverseConv4d",
    "SparseMaxPool1d",
    "SparseMaxPool2d",
    "SparseMaxPool3d",
    "SparseMaxPool4d",
    "SparseModule",
    "SparseReLU",
    "SparseSequential",
    "SubMConv1d",
    "SubMConv2d",
    "SubMConv3d",
    "SubMConv4d",
    "ToDense",
    "Union",
    "assign_name_for_sparse_modules",
    "constants",
    "conv",
    "core",
    "cppcore",
    "functional",
    "hash",
    "identity",
    "modules",
    "np",
    "ops",
    "platform",
    "pool",
    "spatial",
    "tables",
    "torch",
    "utils",
]


class ToDense(SparseModule):
    """SparseConvTensor -> dense [B, C, *shape]."""

    def forward(self, x):
        expect_sparse("ToDense", x)
        return x.dense()


class RemoveGrid(SparseModule):
    """Drops `x.grid`, in place."""

    def forward(self, x):
        expect_sparse("RemoveGrid", x)
        x.grid = None
        return x
