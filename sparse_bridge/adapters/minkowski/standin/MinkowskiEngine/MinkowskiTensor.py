"""What `SparseTensor` and `TensorField` share, and the coordinate manager shared in SHARE mode."""

import operator

import torch
from MinkowskiEngine.MinkowskiCoordinateManager import CoordinateManager
from MinkowskiEngine.old_members import OldTensor

from sparse_bridge.adapters import inference
from sparse_bridge.adapters.convert import kind_of
from sparse_bridge.adapters.lazy_features import LazyFeatures, deferred_of
from sparse_bridge.adapters.minkowski import batches
from sparse_bridge.adapters.minkowski.errors import AbsentError, FeaturesReadOnlyError
from sparse_bridge.adapters.minkowski.upstream.enums import SparseTensorOperationMode, SparseTensorQuantizationMode
from sparse_bridge.core.arguments import refuse_arrays
from sparse_bridge.errors import ContractError

__all__ = [
    "COORDINATE_KEY_DIFFERENT_ERROR",
    "COORDINATE_MANAGER_DIFFERENT_ERROR",
    "SparseTensorOperationMode",
    "SparseTensorQuantizationMode",
    "Tensor",
    "clear_global_coordinate_manager",
    "global_coordinate_manager",
    "set_global_coordinate_manager",
    "set_sparse_tensor_operation_mode",
    "sparse_tensor_operation_mode",
]

_operation_mode = SparseTensorOperationMode.SEPARATE_COORDINATE_MANAGER
_global_manager = None

COORDINATE_MANAGER_DIFFERENT_ERROR = "SparseTensors must share the same coordinate manager for this operation. Please refer to the SparseTensor creation API (coordinate_manager=) or set_sparse_tensor_operation_mode(SHARE_COORDINATE_MANAGER)."  # noqa: E501
COORDINATE_KEY_DIFFERENT_ERROR = "SparseTensors must have the same coordinate_map_key."


def set_sparse_tensor_operation_mode(operation_mode):
    """Whether tensors made from coordinates get managers of their own or share one.

    Raises: ContractError (an AssertionError) unless given a SparseTensorOperationMode.
    """
    if not isinstance(operation_mode, SparseTensorOperationMode):
        raise ContractError(f"{operation_mode!r} is not a SparseTensorOperationMode.")
    global _operation_mode
    _operation_mode = operation_mode


def sparse_tensor_operation_mode():
    """The mode in force."""
    return _operation_mode


def global_coordinate_manager():
    """The shared manager, None before its first use."""
    return _global_manager


def set_global_coordinate_manager(coordinate_manager):
    """Share this manager from now on.

    Raises: ContractError unless given a CoordinateManager, or None to let go.
    """
    global _global_manager
    if not isinstance(coordinate_manager, CoordinateManager | None):
        raise ContractError(f"{coordinate_manager!r} is not a CoordinateManager.")
    _global_manager = coordinate_manager


def clear_global_coordinate_manager():
    """Let go of the shared manager; its memory is free once its tensors are gone."""
    global _global_manager
    _global_manager = None


def shared_manager():
    """The global manager, where tensors share it; None otherwise."""
    shares = _operation_mode is SparseTensorOperationMode.SHARE_COORDINATE_MANAGER
    return _global_manager if shares else None


def choose_manager(manager, dimension, make):
    """The manager a new tensor joins: the given one, the shared one, or `make()`."""
    if manager is not None:
        if dimension != manager.D:
            raise ContractError(f"coordinates of {dimension} axes for a coordinate manager of D={manager.D}.")
        return manager
    if _operation_mode is SparseTensorOperationMode.SEPARATE_COORDINATE_MANAGER:
        return make()
    if _global_manager is None:
        set_global_coordinate_manager(make())
    if dimension != _global_manager.D:
        raise ContractError(
            f"coordinates of {dimension} axes, but the global coordinate manager has "
            f"D={_global_manager.D}; call clear_global_coordinate_manager() first."
        )
    return _global_manager


class Tensor(OldTensor, LazyFeatures):
    """Features with coordinates in a coordinate manager."""

    __slots__ = ("_C", "_D", "_F", "__weakref__", "_late", "_manager", "quantization_mode")
    features_attribute, features_in_slot = "_F", True

    # Subclasses: key under which the manager holds the coordinates, and a tensor like this one.
    _map_key = None

    def _with(self, features):
        raise NotImplementedError

    def leave_graph(self):
        """Before a layer that runs between two compiled graphs."""
        self._manager._manager.leave_graph()

    @property
    def coordinate_manager(self):
        return self._manager

    @property
    def coordinate_key(self):
        return self._map_key

    @property
    def F(self):
        """Features [N, C]. Assigning raises FeaturesReadOnlyError."""
        return self._F

    @F.setter
    def F(self, value):
        raise FeaturesReadOnlyError(
            "the features of a tensor cannot be assigned; make one of the new ones: ME.SparseTensor(features, "
            "coordinate_map_key=x.coordinate_map_key, coordinate_manager=x.coordinate_manager)."
        )

    features = F

    @property
    def coordinates(self):
        return self.C

    @property
    def D(self):
        return self._D

    @property
    def dimension(self):
        return self._D

    @property
    def shape(self):
        return self._F.shape

    def size(self):
        return self._F.size()

    def __len__(self):
        return len(self._F)

    @property
    def dtype(self):
        return self._F.dtype

    @property
    def device(self):
        return self._F.device

    def get_device(self):
        return self._F.get_device()

    @property
    def requires_grad(self):
        return self._F.requires_grad

    def requires_grad_(self, requires_grad=True):
        """In place; returns None."""
        self._F.requires_grad_(requires_grad)

    def detach(self):
        """Replaces the features by their detached view; returns self."""
        self._F = self._F.detach()
        return self

    def float(self):
        """In place; returns self."""
        self._F = self._F.float()
        return self

    def double(self):
        """In place; returns self."""
        self._F = self._F.double()
        return self

    # batch items

    @property
    def decomposition_permutations(self):
        """Ascending rows of each batch index 0 .. max of the manager, int64, empty where absent; in
        0.4 of each batch index that was entered."""
        return batches.listed(self._items())

    @property
    def _batchwise_row_indices(self):
        return self.decomposition_permutations

    @property
    def _sorted_batchwise_row_indices(self):
        raise AbsentError("_sorted_batchwise_row_indices does not exist; use decomposition_permutations.")

    @property
    def decomposed_coordinates(self):
        """Per entry of `decomposition_permutations`, coordinates [n, D] without batch column."""
        coordinates, parts = self.C, self.decomposition_permutations
        return [coordinates[part.to(coordinates.device), 1:] for part in parts]

    @property
    def decomposed_features(self):
        """Per entry of `decomposition_permutations`, the features [n, C]."""
        return [self._F[part] for part in self.decomposition_permutations]

    @property
    def decomposed_coordinates_and_features(self):
        """(decomposed_coordinates, decomposed_features)."""
        return self.decomposed_coordinates, self.decomposed_features

    def _rows_at(self, batch_index):
        """Rows of a batch index; -1 is the last entry of `decomposition_permutations`, and so on.
        Raises ItemIndexError (an IndexError)."""
        return batches.rows_at(self._items(), batch_index)

    def coordinates_at(self, batch_index):
        """Coordinates [n, D] of one batch index."""
        return self.C[self._rows_at(batch_index).to(self.C.device), 1:]

    def features_at(self, batch_index):
        """Features [n, C] of one batch index."""
        return self._F[self._rows_at(batch_index)]

    def coordinates_and_features_at(self, batch_index):
        """(coordinates_at, features_at)."""
        return self.coordinates_at(batch_index), self.features_at(batch_index)

    # arithmetic

    def _is_alike(self, other):
        return isinstance(other, type(self)) or (isinstance(other, Tensor) and isinstance(self, type(other)))

    def _same_map(self, other):
        return self._map_key == other._map_key

    def _check_manager(self, other):
        if self._manager is not other._manager:
            raise ContractError(COORDINATE_MANAGER_DIFFERENT_ERROR)

    def _binary(self, other, function):
        if isinstance(other, torch.Tensor):
            return self._with(function(self._F, other))
        if not self._is_alike(other):
            refuse_arrays(type(self).__name__, other=other)
            raise ContractError(
                f"{type(self).__name__} and {kind_of(other, 'minkowski')} do not combine; expected "
                f"another {type(self).__name__} or a torch.Tensor."
            )
        self._check_manager(other)
        if self._same_map(other):
            if function is operator.add:
                return self._with(inference.plus(self, other))
            return self._with(function(self._F, other._F))
        return self._combined(other, function)

    def _combined(self, other, function):
        raise NotImplementedError

    def _in_place(self, other, function):
        if not self._is_alike(other):
            raise ContractError(
                f"an in-place operation of {type(self).__name__} with {type(other).__name__}; "
                f"expected another {type(self).__name__}."
            )
        self._check_manager(other)
        if not self._same_map(other):
            raise ContractError(f"{COORDINATE_KEY_DIFFERENT_ERROR} {self._map_key} != {other._map_key}")
        if function is operator.iadd and deferred_of(self) is not None:
            inference.plus(self, other, inplace=True)
        else:
            self._F = function(self._F, other._F)
        return self

    def __add__(self, other):
        return self._binary(other, operator.add)

    def __sub__(self, other):
        return self._binary(other, operator.sub)

    def __mul__(self, other):
        return self._binary(other, operator.mul)

    def __truediv__(self, other):
        return self._binary(other, operator.truediv)

    def __iadd__(self, other):
        return self._in_place(other, operator.iadd)

    def __isub__(self, other):
        return self._in_place(other, operator.isub)

    def __imul__(self, other):
        return self._in_place(other, operator.imul)

    def __power__(self, power):
        """Features to a power; `**` is not defined."""
        return self._with(self._F**power)


def expect_kind(layer, input):
    """Raise the ContractError for what is neither SparseTensor nor TensorField."""
    if not isinstance(input, Tensor):
        refuse_kind(layer, input)


def refuse_kind(layer, input):
    """Raise the ContractError for what is neither SparseTensor nor TensorField."""
    raise ContractError(
        f"{type(layer).__name__} takes a SparseTensor or TensorField, got {kind_of(input, 'minkowski')}."
    )
