"""`SparseTensor`: features [N, C] at integer coordinates."""

import torch
from MinkowskiEngine.MinkowskiCommon import convert_to_int_list
from MinkowskiEngine.MinkowskiCoordinateManager import new_manager
from MinkowskiEngine.MinkowskiTensor import (
    COORDINATE_KEY_DIFFERENT_ERROR,
    COORDINATE_MANAGER_DIFFERENT_ERROR,
    SparseTensorOperationMode,
    SparseTensorQuantizationMode,
    Tensor,
    choose_manager,
    clear_global_coordinate_manager,
    global_coordinate_manager,
    set_global_coordinate_manager,
    set_sparse_tensor_operation_mode,
    shared_manager,
    sparse_tensor_operation_mode,
)
from MinkowskiEngine.old_members import OldSparseTensor
from MinkowskiEngineBackend._C import CoordinateMapKey

from sparse_bridge import log
from sparse_bridge.adapters.convert import kind_of
from sparse_bridge.adapters.lazy_features import keep
from sparse_bridge.adapters.minkowski import batches, dense, profile, rows
from sparse_bridge.adapters.minkowski.errors import AbsentError, ArgumentValueError, CoordinateTypeError, ReadOnlyError
from sparse_bridge.adapters.minkowski.grid import integral
from sparse_bridge.adapters.minkowski.tensors import check_features, check_pair, followed, moved
from sparse_bridge.adapters.minkowski.upstream.arguments import arguments_of_0_4
from sparse_bridge.adapters.minkowski.upstream.enums import checked
from sparse_bridge.adapters.minkowski.upstream.keys import CoordsKey, fill
from sparse_bridge.adapters.minkowski.upstream.quantize import reduce_points
from sparse_bridge.core.arguments import expect_tensors, refuse_arrays
from sparse_bridge.core.conv.deferred.conv import DeferredConv
from sparse_bridge.errors import ContractError

__all__ = [
    "COORDINATE_KEY_DIFFERENT_ERROR",
    "COORDINATE_MANAGER_DIFFERENT_ERROR",
    "SparseTensor",
    "SparseTensorOperationMode",
    "SparseTensorQuantizationMode",
    "_get_coordinate_map_key",
    "clear_global_coordinate_manager",
    "global_coordinate_manager",
    "set_global_coordinate_manager",
    "set_sparse_tensor_operation_mode",
    "sparse_tensor_operation_mode",
]


def _has_key(*arguments):
    """Whether 0.4's coords_key stands where 0.5 takes a tensor stride."""
    return arguments[2] is None or isinstance(arguments[2], CoordinateMapKey)


def _has_corner(*arguments):
    """Whether 0.4's min_coords or max_coords stand where 0.5 takes a shape."""
    return isinstance(arguments[0], torch.Tensor)


class SparseTensor(OldSparseTensor, Tensor):
    """A sparse tensor: features [N, C], coordinates int32 [N, D + 1] with the batch index first.

    Args:
        features: [N, C], any dtype.
        coordinates: [N, D + 1]; other dtypes than int32 are floored. Points that share a coordinate
            are merged by `quantization_mode`; rows keep their order, first ones stand for merged.
        tensor_stride: int or one per axis; a label.
        coordinate_map_key, coordinate_manager: in place of coordinates, those of another tensor.
        device: moves features and coordinates first.  requires_grad: of the features.

    Raises: ContractError (an AssertionError), ArgumentValueError, CoordinateTypeError,
        CoordinateError.
    """

    __slots__ = ("_inverse_mapping", "_unique_index", "coordinate_map_key")

    @arguments_of_0_4(
        "feats=features coords=coordinates coords_key=coordinate_map_key "
        "coords_manager=coordinate_manager force_creation allow_duplicate_coords "
        "quantization_mode memory_manager_backend=allocator_type tensor_stride",
        also="is_transpose",
        recognised=_has_key,
    )
    def __init__(
        self,
        features,
        coordinates=None,
        tensor_stride=1,
        coordinate_map_key=None,
        coordinate_manager=None,
        quantization_mode=SparseTensorQuantizationMode.RANDOM_SUBSAMPLE,
        allocator_type=None,
        minkowski_algorithm=None,
        requires_grad=None,
        device=None,
    ):
        check_features(features)
        features, coordinates = moved(features, coordinates, device)
        self.quantization_mode = checked("quantization_mode", quantization_mode, SparseTensorQuantizationMode)
        self._C = self._late = None
        if coordinates is None:
            self._share(features, coordinate_map_key, coordinate_manager)
        else:
            if isinstance(coordinate_map_key, CoordsKey) and not coordinate_map_key.isKeySet():
                tensor_stride = coordinate_map_key.getTensorStride()  # 0.4 fills it in
            elif coordinate_map_key is not None:
                raise ContractError("give coordinates or a coordinate_map_key, not both.")
            make = (allocator_type, minkowski_algorithm)
            self._create(features, coordinates, tensor_stride, coordinate_manager, make)
            fill(coordinate_map_key, self.coordinate_map_key.key)
        if requires_grad is not None:
            self._F.requires_grad_(requires_grad)

    def _share(self, features, key, manager):
        if key is None:
            raise ArgumentValueError("SparseTensor needs coordinates, or a coordinate_map_key and coordinate_manager.")
        if manager is None and profile.is_old():
            manager = shared_manager()
        if manager is None:
            raise ContractError("a coordinate_map_key belongs to a coordinate_manager; give both.")
        if not key.is_key_set():
            raise ContractError("the coordinate_map_key is not set.")
        self._F, self._manager, self._D = features, manager, key.get_coordinate_size() - 1
        self.coordinate_map_key = key

    def _create(self, features, coordinates, tensor_stride, manager, make):
        check_pair(features, coordinates := followed(features, coordinates))
        if coordinates.dtype != torch.int32:
            log.warn(f"{coordinates.dtype} coordinates are floored and made int32; pass `.int()`.", UserWarning)
            coordinates = integral(coordinates)
        self._D = coordinates.shape[1] - 1
        self._manager = choose_manager(manager, self._D, lambda: new_manager(self._D, coordinates, *make))
        self.initialize_coordinates(coordinates, features, convert_to_int_list(tensor_stride, self._D, "tensor_stride"))

    def initialize_coordinates(self, coordinates, features, coordinate_map_key):
        """Enter coordinates under a key (or tensor stride) and merge the features."""
        stride, name = coordinate_map_key, ""
        if isinstance(coordinate_map_key, CoordinateMapKey):
            stride, name = coordinate_map_key.get_key()
        if torch.compiler.is_compiling():
            from sparse_bridge.adapters.minkowski import compiled

            self.coordinate_map_key = CoordinateMapKey.of((tuple(stride), name))
            self._F, self._C = compiled.inserted(self, features, coordinates)
            return
        key, first, inverse = self._manager._manager.insert(coordinates, tuple(stride), name)
        self.coordinate_map_key = CoordinateMapKey.of(key)
        n_rows = self._manager._manager.grid(key).n_rows
        self._F = reduce_points(features, self.quantization_mode, first, inverse, n_rows)
        self._inverse_mapping, self._unique_index = inverse, first

    @property
    def _map_key(self):
        return self.coordinate_map_key

    @classmethod
    def _of(cls, features, key, manager):
        """A tensor of a layer's features on the map `key`; nothing is checked."""
        tensor = object.__new__(SparseTensor)
        tensor._late = None
        if type(features) is torch.Tensor:
            tensor._F = features
        else:
            keep(tensor, features)
        tensor._C, tensor._manager = None, manager
        tensor._D, tensor.quantization_mode = manager.D, SparseTensorQuantizationMode.RANDOM_SUBSAMPLE
        tensor.coordinate_map_key = CoordinateMapKey.of(key)
        return tensor

    def _with(self, features):
        tensor = object.__new__(SparseTensor)
        tensor._late = None
        if type(features) is DeferredConv:
            keep(tensor, features)
        else:
            if not isinstance(features, torch.Tensor) or features.ndim != 2:
                check_features(features)
            tensor._F = features
        tensor._C, tensor._manager, tensor._D = None, self._manager, self._D
        tensor.quantization_mode = SparseTensorQuantizationMode.RANDOM_SUBSAMPLE
        tensor.coordinate_map_key = self.coordinate_map_key
        return tensor

    def _combined(self, other, function):
        features, key = rows.combine(
            self._manager._manager,
            self._F,
            other._F,
            self.coordinate_map_key.key,
            other.coordinate_map_key.key,
            function,
        )
        return SparseTensor._of(features, key, self._manager)

    @property
    def C(self):
        """Coordinates, int32 [N, D + 1]; one tensor per object, changing it changes no map."""
        if torch.compiler.is_compiling() and self._C is None:
            self._C = rows.coords_in_graph(self._manager, self.coordinate_map_key.key)
        elif self._C is None:
            coordinates = self._manager.get_coordinates(self.coordinate_map_key)
            on_cpu = coordinates.is_cuda and profile.is_old()  # where 0.4 kept them
            self._C = coordinates.cpu() if on_cpu else coordinates
        return self._C

    def _sites(self):
        """The coordinates where the features are; not to be changed."""
        return self._manager._manager.grid(self.coordinate_map_key.key).coords

    @property
    def tensor_stride(self):
        return self.coordinate_map_key.get_tensor_stride()

    @tensor_stride.setter
    def tensor_stride(self, value):
        raise ReadOnlyError("tensor_stride cannot be assigned; it belongs to the coordinate map.")

    @property
    def inverse_mapping(self):
        """int64 [rows given]: row of this tensor for every row of the given coordinates."""
        return self._built("inverse_mapping")

    @property
    def unique_index(self):
        """int64 [N]: row of the given coordinates that each row was taken from."""
        return self._built("unique_index")

    def _built(self, name):
        if not hasattr(self, "_inverse_mapping"):
            raise AbsentError(f"{name} exists on tensors made from coordinates, not on results of layers.")
        if self._inverse_mapping is None:  # every row was different
            rows = torch.arange(len(self), device=self.device)
            self._inverse_mapping = self._unique_index = rows
        return getattr(self, f"_{name}")

    def _items(self):
        return batches.item_rows(self._manager._manager, self.coordinate_map_key.key)

    # dense and sparse torch tensors

    @arguments_of_0_4("min_coords max_coords contract_coords", recognised=_has_corner)
    def dense(
        self,
        shape=None,
        min_coordinate=None,
        contract_stride=True,
        *,
        min_coords=None,
        max_coords=None,
        contract_coords=None,
    ):
        """(dense [B, C, X_1 .. X_D], min_coordinate int32 [1, D], tensor_stride int32 [D]).

        Args:
            shape: torch.Size [B, C, X_1 .. X_D]; the channels of it do not matter.
            min_coordinate: IntTensor [D], a multiple of the tensor stride, subtracted first.
            contract_stride: divide coordinates by the tensor stride.

        In 0.4: dense(min_coords=None, max_coords=None, contract_coords=True), of that box.
        Raises: ArgumentValueError (negative coordinates without a minimum), ContractError,
            DenseIndexError (a coordinate outside of the shape).
        """
        old = (min_coords, max_coords, contract_coords)
        return dense.dense(self, shape, min_coordinate, contract_stride, old)

    def sparse(self, min_coords=None, max_coords=None, contract_coords=True):
        """(torch.sparse_coo_tensor [B, X_1 .. X_D, C], min_coords int32 [1, D], tensor_stride)."""
        return dense.coo(self, min_coords, max_coords, contract_coords)

    # points

    def slice(self, X, slicing_mode=0):
        """The features of the voxel that holds each point of `X`: a TensorField.

        X: a TensorField, or a SparseTensor made from coordinates: of this key, in 0.4 also of a
            finer one, and features alone come back.  slicing_mode: of 0.4; 0 is the only one.
        Raises: ContractError, ArgumentValueError (another mode), CoordinateError (a point without
            voxel).
        """
        from MinkowskiEngine.MinkowskiTensorField import slice_tensor

        return slice_tensor(self, X, slicing_mode)

    def cat_slice(self, X, slicing_mode=0):
        """`slice`, with the point's own features appended."""
        from MinkowskiEngine.MinkowskiTensorField import cat_slice_tensor

        return cat_slice_tensor(self, X, slicing_mode)

    def interpolate(self, X):
        """Multilinear interpolation at the points of a TensorField: a TensorField."""
        from MinkowskiEngine.MinkowskiTensorField import interpolate_tensor

        return interpolate_tensor(self, X)

    def features_at_coordinates(self, query_coordinates):
        """Multilinear interpolation at float positions [M, D + 1]: [M, C]. Absent voxels are 0.

        Raises: ContractError (dtype, device or shape of the positions), CoordinateError.
        """
        from MinkowskiEngine.MinkowskiInterpolation import interpolate_at

        expect_tensors("features_at_coordinates", query_coordinates=query_coordinates)
        if query_coordinates.dtype != self.dtype and self.dtype.itemsize > 2:
            raise ContractError(f"positions are {query_coordinates.dtype}, features {self.dtype}; expected one dtype.")
        if query_coordinates.device != self.device:
            raise ContractError(f"positions are on {query_coordinates.device}, features on {self.device}.")
        return interpolate_at(self, query_coordinates)[0]

    def __repr__(self):
        return (
            f"{self.__class__.__name__}(\n  coordinates={self.C}\n  features={self._F}\n"
            f"  coordinate_map_key={self.coordinate_map_key}\n"
            f"  coordinate_manager={self._manager}  spatial dimension={self._D})"
        )


def refuse_input(layer, input):
    """Raise the ContractError for what is no SparseTensor, or has another dimension."""
    if isinstance(input, SparseTensor):
        raise ContractError(f"{type(layer).__name__} has dimension {layer.dimension}, its input has D={input.D}.")
    raise ContractError(f"{type(layer).__name__} takes a SparseTensor, got {kind_of(input, 'minkowski')}.")


def _get_coordinate_map_key(input, coordinates=None, tensor_stride=1, expand_coordinates=False):
    """The output key of a layer: that of `coordinates`, which are entered if they are a tensor.
    An unset key without them; `expand_coordinates` changes nothing.
    Raises: ContractError, CoordinateTypeError.
    """
    if coordinates is None:
        return CoordinateMapKey(input.coordinate_map_key.get_coordinate_size())
    if isinstance(coordinates, CoordinateMapKey):
        return coordinates
    if isinstance(coordinates, SparseTensor):
        if coordinates._manager is not input._manager:
            raise ContractError(COORDINATE_MANAGER_DIFFERENT_ERROR)
        return coordinates.coordinate_map_key
    if not isinstance(coordinates, torch.Tensor):
        refuse_arrays("the layer", coordinates=coordinates)
        raise ContractError(
            f"coordinates are {type(coordinates).__name__}; expected an IntTensor, a "
            "CoordinateMapKey or a SparseTensor."
        )
    if coordinates.dtype != torch.int32:
        raise CoordinateTypeError(f"coordinates are {coordinates.dtype}; expected torch.int32 (use .int()).")
    return input._manager.insert_and_map(coordinates, tensor_stride)[0]
