"""Linear layers, joins of tensors, stacks of modules, and conversions from and to dense tensors."""

from functools import reduce

import torch
from MinkowskiEngine.MinkowskiCommon import MinkowskiModuleBase
from MinkowskiEngine.MinkowskiSparseTensor import SparseTensor, refuse_input
from MinkowskiEngine.MinkowskiTensor import (
    COORDINATE_KEY_DIFFERENT_ERROR,
    COORDINATE_MANAGER_DIFFERENT_ERROR,
    Tensor,
    refuse_kind,
)
from MinkowskiEngine.MinkowskiTensorField import TensorField
from torch import nn

from sparse_bridge.adapters.call_stats import note
from sparse_bridge.adapters.convert import kind_of
from sparse_bridge.adapters.minkowski import dense
from sparse_bridge.adapters.minkowski.errors import ArgumentValueError
from sparse_bridge.core.arguments import expect_tensors, refuse_arrays
from sparse_bridge.errors import ContractError

__all__ = [
    "MinkowskiLinear",
    "MinkowskiStackCat",
    "MinkowskiStackMean",
    "MinkowskiStackSum",
    "MinkowskiStackVar",
    "MinkowskiToDenseTensor",
    "MinkowskiToFeature",
    "MinkowskiToSparseTensor",
    "SparseTensor",
    "TensorField",
    "_sum",
    "cat",
    "dense_coordinates",
    "mean",
    "to_sparse",
    "to_sparse_all",
    "var",
]


class MinkowskiLinear(MinkowskiModuleBase):
    """torch's Linear on the features, in child `linear`; SparseTensors and TensorFields."""

    def __init__(self, in_features, out_features, bias=True):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, bias=bias)

    def forward(self, input):
        if not isinstance(input, Tensor):
            refuse_kind(self, input)
        output = input._with(self._modules["linear"](input._F))
        note("minkowski", type(self).__name__)
        return output

    def __repr__(self):
        linear = self.linear
        return (
            f"{self.__class__.__name__}(in_features={linear.in_features}, "
            f"out_features={linear.out_features}, bias={linear.bias is not None})"
        )


def _joined(tensors):
    """The tensors of cat(a, b) or cat([a, b]); checked to share one key.

    Raises: ContractError (an AssertionError), ArgumentValueError (a ValueError).
    """
    if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
        tensors = tuple(tensors[0])
    if len(tensors) < 2:
        raise ContractError(f"expected two or more tensors, got {len(tensors)}.")
    first = tensors[0]
    for tensor in tensors:
        if not isinstance(tensor, (SparseTensor, TensorField)):
            raise ArgumentValueError(f"expected SparseTensors or TensorFields, got {kind_of(tensor, 'minkowski')}.")
        if type(tensor) is not type(first):
            raise ContractError("SparseTensors and TensorFields do not mix.")
        if tensor._manager is not first._manager:
            raise ContractError(COORDINATE_MANAGER_DIFFERENT_ERROR)
        if tensor._map_key != first._map_key:
            raise ContractError(f"{COORDINATE_KEY_DIFFERENT_ERROR} {first._map_key} != {tensor._map_key}")
    return tensors


def _result(tensors, features):
    first = tensors[0]
    if isinstance(first, TensorField):
        field = TensorField(
            features, coordinate_field_map_key=first.coordinate_field_map_key, coordinate_manager=first._manager
        )
        field._C = first._C
        return field
    return first._with(features)


def cat(*sparse_tensors):
    """Concatenate the channels of tensors of one key: cat(a, b, ..) or cat([a, b, ..])."""
    tensors = _joined(sparse_tensors)
    return _result(tensors, torch.cat([tensor.F for tensor in tensors], 1))


def _sum(*sparse_tensors):
    """Sum of tensors of one key."""
    tensors = _joined(sparse_tensors)
    return _result(tensors, reduce(torch.add, [tensor.F for tensor in tensors]))


def mean(*sparse_tensors):
    """Mean of tensors of one key."""
    tensors = _joined(sparse_tensors)
    return _result(tensors, reduce(torch.add, [tensor.F for tensor in tensors]) / len(tensors))


def var(*sparse_tensors):
    """Population variance over tensors of one key."""
    tensors = _joined(sparse_tensors)
    stacked = torch.stack([tensor.F for tensor in tensors])
    return _result(tensors, (stacked - stacked.mean(0)).square().mean(0))


def dense_coordinates(shape):
    """Every position of a dense [B, C, X_1 .. X_D]: int32 [B * prod X, D + 1], CPU."""
    return dense.dense_coordinates(shape)


def to_sparse(x, format=None, coordinates=None, device=None):
    """SparseTensor of the positions of a dense tensor where any channel is not 0.

    format: order of the axes, like "BXXC"; None for batch, channels, axes. coordinates: ignored.
    Raises: ContractError (an AssertionError).
    """
    expect_tensors("to_sparse", x=x)
    where, features = dense.nonzero_cells(x, format)
    return SparseTensor(features, where, device=device)


def to_sparse_all(dense_tensor, coordinates=None):
    """SparseTensor of every position of a dense [B, C, X_1 .. X_D], in row-major order.

    coordinates: those positions, if they were made before (`dense_coordinates`).
    """
    expect_tensors("to_sparse_all", dense_tensor=dense_tensor)
    if coordinates is None:
        coordinates = dense.dense_coordinates(dense_tensor.shape, dense_tensor.device)
    features = dense_tensor.movedim(1, -1).reshape(-1, dense_tensor.shape[1])
    return SparseTensor(features, coordinates.to(dense_tensor.device))


class MinkowskiToSparseTensor(MinkowskiModuleBase):
    """A dense tensor or a TensorField as a SparseTensor.

    remove_zeros: upstream drops zero positions only if `coordinates` are given as well, and then
        ignores those; kept, because models were trained so.
    """

    def __init__(self, remove_zeros=True, coordinates=None):
        super().__init__()
        if remove_zeros and coordinates is not None:
            expect_tensors("MinkowskiToSparseTensor", coordinates=coordinates)
        self.remove_zeros = remove_zeros
        self.coordinates = coordinates

    def forward(self, input):
        if isinstance(input, TensorField):
            return input.sparse()
        if not isinstance(input, torch.Tensor):
            refuse_arrays("MinkowskiToSparseTensor", input=input)
            raise ArgumentValueError(f"expected a dense tensor or a TensorField, got {type(input).__name__}.")
        if self.remove_zeros and self.coordinates is not None:
            return to_sparse(input)
        return to_sparse_all(input, self.coordinates)

    def __repr__(self):
        return self.__class__.__name__ + "()"


class MinkowskiToDenseTensor(MinkowskiModuleBase):
    """`SparseTensor.dense(shape=shape)[0]`."""

    def __init__(self, shape=None):
        super().__init__()
        self.shape = shape

    def forward(self, input):
        if not isinstance(input, SparseTensor):
            refuse_input(self, input)
        return input.dense(shape=self.shape)[0]

    def __repr__(self):
        return self.__class__.__name__ + "()"


class MinkowskiToFeature(MinkowskiModuleBase):
    """The features, a torch.Tensor."""

    def forward(self, x):
        if not isinstance(x, Tensor):
            refuse_kind(self, x)
        return x._F


class _Stack(nn.Sequential):
    """Applies every child to the same input."""

    _join = None

    def forward(self, x):
        return type(self)._join([module(x) for module in self])


class MinkowskiStackCat(_Stack):
    """`cat` of what every child makes of the input."""

    _join = staticmethod(cat)


class MinkowskiStackSum(_Stack):
    """Sum of what every child makes of the input."""

    _join = staticmethod(_sum)


class MinkowskiStackMean(_Stack):
    """Mean of what every child makes of the input."""

    _join = staticmethod(mean)


class MinkowskiStackVar(_Stack):
    """Variance of what every child makes of the input."""

    _join = staticmethod(var)
