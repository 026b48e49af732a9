"""`SparseModule`, containers and wrappers of ordinary layers."""

import sys
import time
from collections import OrderedDict

import torch
from spconv import pytorch as spconv  # noqa: F401 - the name is upstream's
from spconv.pytorch.core import SparseConvTensor
from torch import nn
from torch.fx import Proxy

from sparse_bridge.adapters.spconv.norm import expected_of, run_sequential
from sparse_bridge.adapters.spconv.tracing import as_node
from sparse_bridge.adapters.warmup_registry import expect
from sparse_bridge.core.traced.scripts import refuse_script
from sparse_bridge.errors import ContractError


def is_spconv_module(module):
    """Whether a container hands this module the sparse tensor itself."""
    return isinstance(module, (SparseModule, SparseBatchNorm, SparseReLU))


# The class of all convolutions, and the steps of its forward; its module, which imports this one, puts both here.
_convolution = (), None


def is_sparse_conv(module):
    return isinstance(module, _convolution[0])


class SparseModule(nn.Module):
    """Base of every layer that takes a `SparseConvTensor`."""

    __prepare_scriptable__ = refuse_script

    def __init__(self, name=None):
        super().__init__()
        self.name = name
        self._sparse_unique_name = ""


class _NameTaken(ContractError, ValueError):
    """Two children of a container have one name."""


class SparseSequential(SparseModule):
    """Runs its children in order; ordinary modules act on the features, if there are any rows.

    Children: positional (named "0", "1", ...), or one OrderedDict, plus keywords.
    """

    def __init__(self, *args, **kwargs):
        super().__init__()
        if len(args) == 1 and isinstance(args[0], OrderedDict):
            for key, module in args[0].items():
                self.add_module(key, module)
        else:
            for index, module in enumerate(args):
                self.add_module(str(index), module)
        for name, module in kwargs.items():
            if name in self._modules:
                raise _NameTaken(f"a child named {name!r} exists already.")
            self.add_module(name, module)
        expect(self, expected_of)

    def __getitem__(self, idx):
        if not -len(self) <= idx < len(self):
            raise IndexError(f"index {idx} is out of range")
        return list(self._modules.values())[idx]

    def __len__(self):
        return len(self._modules)

    def add(self, module, name=None):
        if name is None:
            name = str(len(self._modules))
            if name in self._modules:
                raise KeyError("name exists")
        self.add_module(name, module)

    def forward(self, input):
        children = list(self._modules.values())
        return run_sequential(children, input, is_spconv_module, SparseConvTensor, _convolution)


def assign_name_for_sparse_modules(module):
    """Write every sparse module's qualified name into `_sparse_unique_name`."""
    for name, child in module.named_modules():
        if isinstance(child, SparseModule):
            child._sparse_unique_name = name


def _on_features(module, forward, input):
    if isinstance(input, Proxy):
        return as_node(module, input, input)
    if isinstance(input, SparseConvTensor):
        return input.replace_feature(forward(input.features))
    return forward(input)


class SparseBatchNorm(nn.BatchNorm1d):
    __prepare_scriptable__ = refuse_script

    def forward(self, input):
        return _on_features(self, super().forward, input)


class SparseSyncBatchNorm(nn.SyncBatchNorm):
    def forward(self, input):
        return _on_features(self, super().forward, input)


class SparseReLU(nn.ReLU):
    __prepare_scriptable__ = refuse_script

    def forward(self, input):
        return _on_features(self, super().forward, input)


class SparseIdentity(nn.Identity):
    def forward(self, input):
        return input.shadow_copy() if isinstance(input, SparseConvTensor) else input


class PrintTensorMeta(nn.Module):
    """Writes shape and range of the features to stdout."""

    def forward(self, x):
        features = x.features if isinstance(x, SparseConvTensor) else x
        sys.stdout.write(f"{tuple(features.shape)} {features.dtype} min {features.min()} max {features.max()}\n")
        return x


class PrintCurrentTime(nn.Module):
    """Writes the seconds since `first_time` to stdout, after waiting for the GPU.

    first_time: when it was made, or called with reset=True.
    """

    def __init__(self):
        super().__init__()
        self.first_time = time.time()

    def forward(self, x, msg="", reset=False):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if reset:
            self.first_time = time.time()
        sys.stdout.write(f"{msg} {time.time() - self.first_time}\n")
        return x
