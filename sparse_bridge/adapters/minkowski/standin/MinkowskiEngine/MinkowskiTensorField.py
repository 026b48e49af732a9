"""`TensorField`: features at float coordinates, before or after voxels."""

import torch
from MinkowskiEngine.MinkowskiCommon import convert_to_int_list
from MinkowskiEngine.MinkowskiCoordinateManager import new_manager
from MinkowskiEngine.MinkowskiInterpolation import interpolate_at
from MinkowskiEngine.MinkowskiSparseTensor import SparseTensor
from MinkowskiEngine.MinkowskiTensor import (
    COORDINATE_KEY_DIFFERENT_ERROR,
    SparseTensorQuantizationMode,
    Tensor,
    choose_manager,
)
from MinkowskiEngineBackend._C import CoordinateMapKey

from sparse_bridge.adapters.convert import kind_of
from sparse_bridge.adapters.minkowski import batches, manager, profile
from sparse_bridge.adapters.minkowski.errors import AbsentError, ArgumentValueError
from sparse_bridge.adapters.minkowski.grid import integral
from sparse_bridge.adapters.minkowski.points import splat_points
from sparse_bridge.adapters.minkowski.tensors import check_features, check_pair, moved
from sparse_bridge.adapters.minkowski.upstream.quantize import reduce_onto, reduce_points
from sparse_bridge.core.ops.row_matrix import RowMatrix
from sparse_bridge.core.traced import between_graphs
from sparse_bridge.errors import ContractError, CoordinateError

__all__ = ["TensorField", "create_splat_coordinates"]

_Mode = SparseTensorQuantizationMode
_MODES = (_Mode.UNWEIGHTED_AVERAGE, _Mode.UNWEIGHTED_SUM, _Mode.RANDOM_SUBSAMPLE, _Mode.MAX_POOL)
_SLICEABLE = (_Mode.RANDOM_SUBSAMPLE, _Mode.UNWEIGHTED_AVERAGE)


def create_splat_coordinates(coordinates):
    """The 2^D integer corners around every point: IntTensor [N * 2^D, D + 1], by point."""
    return integral(splat_points(coordinates)[0])


class TensorField(Tensor):
    """Features [N, C] of points at float coordinates [N, D + 1], batch index first.

    Args: as SparseTensor, with coordinate_field_map_key for the key of another field. Points keep
        their order and number; `sparse()` merges them by quantization_mode: UNWEIGHTED_AVERAGE,
        UNWEIGHTED_SUM, RANDOM_SUBSAMPLE or MAX_POOL.

    Raises: ContractError (an AssertionError), ArgumentValueError, CoordinateTypeError.
    """

    __slots__ = ("coordinate_field_map_key",)

    def __init__(
        self,
        features,
        coordinates=None,
        tensor_stride=1,
        coordinate_field_map_key=None,
        coordinate_manager=None,
        quantization_mode=_Mode.UNWEIGHTED_AVERAGE,
        allocator_type=None,
        minkowski_algorithm=None,
        requires_grad=None,
        device=None,
    ):
        check_features(features)
        if quantization_mode not in _MODES:
            raise ContractError(
                f"{quantization_mode} of a TensorField; expected one of "
                f"{', '.join(mode.name for mode in _MODES)} (splat() is a method)."
            )
        features, coordinates = moved(features, coordinates, device)
        self._F, self.quantization_mode = features, quantization_mode
        if coordinates is None:
            self._share(coordinate_field_map_key, coordinate_manager)
        else:
            if coordinate_field_map_key is not None:
                raise ContractError("give coordinates or a coordinate_field_map_key, not both.")
            if isinstance(coordinates, torch.Tensor):
                coordinates = coordinates.contiguous()
            check_pair(features, coordinates)
            self._D = coordinates.shape[1] - 1
            self._manager = choose_manager(
                coordinate_manager,
                self._D,
                lambda: new_manager(self._D, coordinates, allocator_type, minkowski_algorithm),
            )
            stride = convert_to_int_list(tensor_stride, self._D, "tensor_stride")
            self.coordinate_field_map_key = self._manager.insert_field(coordinates, stride)
            self._C = coordinates
        if requires_grad is not None:
            self._F.requires_grad_(requires_grad)

    def _share(self, key, manager):
        if key is None:
            raise ArgumentValueError(
                "TensorField needs coordinates, or a coordinate_field_map_key and coordinate_manager."
            )
        if manager is None or not key.is_key_set():
            raise ContractError("a coordinate_field_map_key must be set and come with its coordinate_manager.")
        self._C, self._D, self._manager = None, key.get_coordinate_size() - 1, manager
        self.coordinate_field_map_key = key

    @property
    def _map_key(self):
        return self.coordinate_field_map_key

    def _with(self, features, quantization_mode=None):
        field = TensorField(
            features,
            coordinate_field_map_key=self.coordinate_field_map_key,
            coordinate_manager=self._manager,
            quantization_mode=quantization_mode or self.quantization_mode,
        )
        field._C = self._C
        return field

    def _combined(self, other, function):
        raise ContractError(
            f"TensorFields must have the same coordinate_field_map_key: {self._map_key} != "
            f"{other._map_key}. {COORDINATE_KEY_DIFFERENT_ERROR}"
        )

    @property
    def C(self):
        """The coordinates that were given."""
        if self._C is None:
            self._C = self._manager.get_coordinate_field(self.coordinate_field_map_key)
        return self._C

    @property
    def tensor_stride(self):
        raise AbsentError("a TensorField has no tensor_stride.")

    def _items(self):
        return batches.field_rows(self._manager._manager, self.coordinate_field_map_key.key)

    def to(self, device):
        """The field on another device, with a coordinate manager of its own there."""
        device = torch.device(device)
        if device.type == self.device.type and device.index in (None, self.device.index):
            return self
        return TensorField(self._F.to(device), self.C.to(device), quantization_mode=self.quantization_mode)

    def inverse_mapping(self, sparse_tensor_map_key):
        """int64 [N]: row of a sparse map that holds each point; on a coarser map, of its cell.

        Raises: CoordinateError where a point has no voxel.
        """
        return manager.every_point_row(
            self._manager._manager, self.coordinate_field_map_key.key, self._manager._given(sparse_tensor_map_key)
        )

    @between_graphs
    def sparse(self, tensor_stride=1, coordinate_map_key=None, quantization_mode=None):
        """Merge the points of each voxel: a SparseTensor on a new map.

        Args:
            tensor_stride: size of the voxels.
            coordinate_map_key: merge onto this map instead, which must hold every point.
            quantization_mode: instead of the field's own.

        Raises: ArgumentValueError (NO_QUANTIZATION), ContractError (SPLAT_LINEAR_INTERPOLATION,
            a point without voxel).
        """
        mode = quantization_mode or self.quantization_mode
        if mode is _Mode.SPLAT_LINEAR_INTERPOLATION:
            raise ContractError("use splat() for SPLAT_LINEAR_INTERPOLATION.")
        if mode not in _MODES:
            raise ArgumentValueError(f"{mode} does not merge points.")
        registry, field_key = self._manager._manager, self.coordinate_field_map_key.key
        if coordinate_map_key is not None:
            rows = manager.point_rows(registry, field_key, coordinate_map_key.key)
            if bool((rows < 0).any()):
                raise ContractError(f"some points have no voxel on the map {coordinate_map_key}.")
            n_rows = registry.grid(coordinate_map_key.key).n_rows
            features, key = reduce_onto(self._F, mode, rows, n_rows), coordinate_map_key
        else:
            stride = tuple(convert_to_int_list(tensor_stride, self._D, "tensor_stride"))
            out_key, first, inverse = manager.voxelize(registry, field_key, stride)
            n_rows = registry.grid(out_key).n_rows
            features = reduce_points(self._F, mode, first, inverse, n_rows)
            key = CoordinateMapKey.of(out_key)
        return SparseTensor(features, coordinate_map_key=key, coordinate_manager=self._manager)

    @between_graphs
    def splat(self):
        """Spread every point onto its 2^D corners by multilinear weights: a SparseTensor."""
        registry = self._manager._manager
        points, weights = splat_points(registry.field(self.coordinate_field_map_key.key).coords)
        key, _, rows = registry.insert(points, (1,) * self._D, aligned=True)
        if rows is None:
            rows = torch.arange(len(points), device=points.device)
        samples = torch.arange(len(self._F), device=rows.device)
        samples = samples.repeat_interleave(2**self._D)
        matrix = RowMatrix(rows, samples, weights, registry.grid(key).n_rows, len(self._F))
        return SparseTensor(
            matrix.multiply(self._F), coordinate_map_key=CoordinateMapKey.of(key), coordinate_manager=self._manager
        )

    def __repr__(self):
        return (
            f"{self.__class__.__name__}(\n  coordinates={self.C}\n  features={self._F}\n"
            f"  coordinate_field_map_key={self.coordinate_field_map_key}\n"
            f"  coordinate_manager={self._manager}  spatial dimension={self._D})"
        )


def _check_same_manager(x, points):
    if x._manager is not points._manager:
        raise ContractError("the tensor and the points must share one coordinate manager.")


def _cells(x, finer):
    """int64: the row of `x` whose cell holds each row of a finer tensor. Raises CoordinateError."""
    _check_same_manager(x, finer)
    keys = finer.coordinate_map_key.key, x.coordinate_map_key.key
    rows = x._manager._manager.parent_rows(*keys)
    missing = int((rows < 0).sum())
    if missing:
        raise CoordinateError(f"{missing} of {len(rows)} rows have no cell on the map {x.coordinate_map_key}.")
    return rows


def _of_points(x, points, slicing_mode):
    """(matrix from the rows of `x` to the points, maker of the resulting field)."""
    if slicing_mode != 0:
        raise ArgumentValueError(f"slicing_mode is {slicing_mode!r}; 0 is the only one.")
    if isinstance(points, TensorField):
        _check_same_manager(x, points)
        if points.quantization_mode not in _SLICEABLE:
            raise ContractError(
                f"slice() of a field with {points.quantization_mode}; it undoes "
                "RANDOM_SUBSAMPLE and UNWEIGHTED_AVERAGE."
            )
        keys = points.coordinate_field_map_key.key, x.coordinate_map_key.key
        return manager.slice_matrix(x._manager._manager, *keys), points._with
    if not isinstance(points, SparseTensor):
        raise ContractError(f"slice() takes a TensorField or SparseTensor, got {kind_of(points, 'minkowski')}.")
    rows = points.inverse_mapping
    if x.coordinate_map_key != points.coordinate_map_key:
        if not profile.is_old():
            raise ContractError("slice() of a SparseTensor needs one with the same key.")
        rows = _cells(x, points)[rows]
    elif x._manager is not points._manager and not torch.equal(x._sites(), points._sites()):
        raise ContractError("slice() between two coordinate managers needs tensors of the same coordinates and rows.")
    every = torch.arange(len(rows), device=rows.device)
    coordinates = points._sites().index_select(0, rows)

    def make(features):
        if profile.is_old():  # which had no fields
            return features
        return TensorField(features, coordinates, coordinate_manager=x._manager)

    return RowMatrix(every, rows, None, len(rows), len(x)), make


@between_graphs
def slice_tensor(x, points, slicing_mode):
    matrix, make = _of_points(x, points, slicing_mode)
    return make(matrix.multiply(x._F))


@between_graphs
def cat_slice_tensor(x, points, slicing_mode):
    matrix, make = _of_points(x, points, slicing_mode)
    own = points._F if isinstance(points, TensorField) else points._F[points.inverse_mapping]
    return make(torch.cat([matrix.multiply(x._F), own], 1))


@between_graphs
def interpolate_tensor(x, points):
    if not isinstance(points, TensorField):
        raise ContractError(f"interpolate() takes a TensorField, got {kind_of(points, 'minkowski')}.")
    _check_same_manager(x, points)
    field = x._manager._manager.field(points.coordinate_field_map_key.key)
    return points._with(interpolate_at(x, field.coords)[0])
