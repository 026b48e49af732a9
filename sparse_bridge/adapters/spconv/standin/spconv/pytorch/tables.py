"""Layers over lists of sparse tensors."""

import torch
from spconv.pytorch import functional as F  # noqa: F401 - the name is upstream's
from spconv.pytorch.core import SparseConvTensor as SparseConvTensor
from spconv.pytorch.modules import SparseModule

from sparse_bridge.adapters.spconv.tensors import expect_sparse_list
from sparse_bridge.adapters.spconv.tracing import one_node
from sparse_bridge.errors import ContractError


def _check(table, inputs):
    expect_sparse_list(type(table).__name__, inputs)
    first, second = inputs[0], inputs[1]
    for other in inputs[1:]:
        for attribute in ("spatial_shape", "batch_size"):
            if getattr(first, attribute) != getattr(other, attribute):
                raise ContractError(
                    f"{attribute} differs: {getattr(first, attribute)} and {getattr(other, attribute)}."
                )
        if first.features.shape[1] != other.features.shape[1]:
            raise ContractError(f"channel counts differ: {first.features.shape[1]} and {other.features.shape[1]}.")
        if first.features.shape[0] != other.features.shape[0]:
            raise ContractError(
                "different indices: the tensors have "
                f"{first.features.shape[0]} and {other.features.shape[0]} rows; they must share "
                "their coordinates."
            )
    return first, second


def _like_first(first, second, features):
    result = first.replace_feature(features)
    result.benchmark_record = second.benchmark_record
    result.thrust_allocator = second.thrust_allocator
    result._timer = second._timer
    return result


class JoinTable(SparseModule):
    """Concatenates the features of tensors that share their coordinates."""

    @one_node
    def forward(self, input):
        first, second = _check(self, input)
        return _like_first(first, second, torch.cat([x.features for x in input], 1))

    def input_spatial_size(self, out_size):
        return out_size


class AddTable(SparseModule):
    """Adds the features of tensors that share their coordinates."""

    @one_node
    def forward(self, input):
        first, second = _check(self, input)
        return _like_first(first, second, sum(x.features for x in input))

    def input_spatial_size(self, out_size):
        return out_size


class AddTableMisaligned(SparseModule):
    """Adds tensors whose coordinates differ; the result has their union."""

    @one_node
    def forward(self, input):
        from spconv.pytorch import functional

        expect_sparse_list("AddTableMisaligned", input, least=1)
        return functional.sparse_add_hash_based(*input)

    def input_spatial_size(self, out_size):
        return out_size


class ConcatTable(SparseModule):
    """Applies every child to the same input: a list of results."""

    def forward(self, input):
        return [module(input) for module in self._modules.values()]

    def add(self, module):
        self._modules[str(len(self._modules))] = module
        return self

    def input_spatial_size(self, out_size):
        return self._modules["0"].input_spatial_size(out_size)
