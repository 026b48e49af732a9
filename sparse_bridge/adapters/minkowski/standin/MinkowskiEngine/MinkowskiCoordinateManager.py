"""`CoordinateManager`: the coordinate and kernel maps that tensors of one network share."""

import os

import torch
from MinkowskiEngine.MinkowskiCommon import convert_to_int_list
from MinkowskiEngineBackend._C import (
    CoordinateMapKey,
    CoordinateMapManagerCPU,
    CoordinateMapManagerGPU_c10,
    CoordinateMapType,
    GPUMemoryAllocatorType,
    MemoryManagerBackend,
    MinkowskiAlgorithm,
    RegionType,
)

from sparse_bridge import log
from sparse_bridge.adapters.minkowski import batches, manager, profile
from sparse_bridge.adapters.minkowski.errors import ArgumentValueError, CoordinateTypeError
from sparse_bridge.adapters.minkowski.geometry import is_count
from sparse_bridge.adapters.minkowski.maps import MapRegistry
from sparse_bridge.adapters.minkowski.upstream.enums import checked
from sparse_bridge.core.arguments import expect_tensors
from sparse_bridge.errors import ContractError, DataTypeError

__all__ = ["CoordinateManager", "set_coordinate_map_type", "set_gpu_allocator", "set_memory_manager_backend"]

_coordinate_map_type = None
_REGISTRIES = {
    None: MapRegistry,
    CoordinateMapType.CPU: CoordinateMapManagerCPU,
    CoordinateMapType.CUDA: CoordinateMapManagerGPU_c10,
}
_KINDS = {"cpu": CoordinateMapType.CPU, "cuda": CoordinateMapType.CUDA}
_MOST_THREADS = 20
CPU_COUNT = os.cpu_count() or 1  # read here: Dynamo of torch 2.11 refuses the call


def set_coordinate_map_type(coordinate_map_type):
    """Kind of device of managers that are made from now on without one of their own.

    Raises: ContractError unless given a CoordinateMapType.
    """
    global _coordinate_map_type
    _coordinate_map_type = checked("coordinate_map_type", coordinate_map_type, CoordinateMapType)


def set_gpu_allocator(backend):
    """Accepted for compatibility: memory always comes from torch's allocator.

    Raises: ContractError unless given a GPUMemoryAllocatorType.
    """
    checked("backend", backend, GPUMemoryAllocatorType)


def set_memory_manager_backend(backend):
    """0.4's `set_gpu_allocator`, deprecated in 0.5; takes a MemoryManagerBackend, too."""
    if isinstance(backend, MemoryManagerBackend):
        profile.saw_old("set_memory_manager_backend(MemoryManagerBackend)")
        return
    log.warn("set_memory_manager_backend is deprecated; use set_gpu_allocator.", DeprecationWarning)
    set_gpu_allocator(backend)


class CoordinateManager:
    """Maps from coordinates to rows, and kernel maps between them, for D spatial axes.

    A map is found by its key, a tensor stride and a string id. `key` arguments take a
    CoordinateMapKey; most also take a tensor stride, which means the first map of that stride.
    Maps stay as long as the manager; it lives on the device of the first coordinates it gets, which
    must be of the kind `coordinate_map_type`, if that is given or was set.

    Raises: ArgumentValueError (D below 1), ContractError (a CUDA manager without a GPU, a value
        that is no member of its enumeration).
    """

    def __init__(self, D=0, num_threads=-1, coordinate_map_type=None, allocator_type=None, minkowski_algorithm=None):
        if not is_count(D):
            raise ArgumentValueError(f"D={D!r}; a coordinate manager needs its number of axes.")
        if num_threads < 0:
            omp_threads = os.environ.get("OMP_NUM_THREADS", "")
            count = int(omp_threads) if omp_threads.isdigit() else CPU_COUNT
            num_threads = min(count, _MOST_THREADS)
        map_type = coordinate_map_type if coordinate_map_type is not None else _coordinate_map_type
        if map_type is not None:
            checked("coordinate_map_type", map_type, CoordinateMapType)
        if map_type is CoordinateMapType.CUDA and not torch.cuda.is_available():
            raise ContractError("a CUDA coordinate manager needs a GPU; none is available.")
        if allocator_type is not None:
            checked("allocator_type", allocator_type, GPUMemoryAllocatorType, MemoryManagerBackend)
        if minkowski_algorithm is None:
            minkowski_algorithm = MinkowskiAlgorithm.DEFAULT
        self.D = D
        self.num_threads = num_threads
        self.coordinate_map_type = map_type
        self.minkowski_algorithm = checked("minkowski_algorithm", minkowski_algorithm, MinkowskiAlgorithm)
        self._manager = _REGISTRIES[map_type](D)

    # keys

    def _get_coordinate_map_key(self, key_or_tensor_strides):
        """The key object for a key or a tensor stride."""
        return CoordinateMapKey.of(self._key(key_or_tensor_strides))

    @staticmethod
    def _given(key):
        """The value of a key object, where no tensor stride will do."""
        if not isinstance(key, CoordinateMapKey):
            raise DataTypeError(f"expected a CoordinateMapKey, such as x.coordinate_map_key; got {type(key).__name__}.")
        return key.key

    def _key(self, key):
        if isinstance(key, CoordinateMapKey):
            return key.key
        return self._manager.first_key(tuple(convert_to_int_list(key, self.D)))

    def get_unique_coordinate_map_key(self, tensor_stride):
        """(tensor stride, string id) that no map has."""
        stride = tuple(convert_to_int_list(tensor_stride, self.D))
        taken, (_, name) = (stride, ""), self._manager.free_key(stride)
        while not name or (stride, name) == taken:
            _, name = self._manager.free_key(stride, self._manager.tag())
        return list(stride), name

    # coordinates

    def insert_and_map(self, coordinates, tensor_stride=1, string_id=""):
        """Enter int32 coordinates [N, D + 1]: (key, (unique map [U], inverse map [N])), int64.

        Raises: CoordinateTypeError, ContractError, TensorDeviceError.
        """
        self._check(coordinates)
        if coordinates.dtype != torch.int32:
            raise CoordinateTypeError(f"coordinates are {coordinates.dtype}; expected torch.int32 (use .int()).")
        stride = tuple(convert_to_int_list(tensor_stride, self.D))
        key, first, inverse = self._manager.insert(coordinates, stride, string_id)
        if inverse is None:
            inverse = torch.arange(len(coordinates), device=coordinates.device)
        return CoordinateMapKey.of(key), (inverse if first is None else first, inverse)

    def _check(self, coordinates):
        expect_tensors("CoordinateManager", coordinates=coordinates)
        if coordinates.ndim != 2:
            raise ContractError(f"coordinates must be a tensor [N, {self.D + 1}].")
        if coordinates.shape[1] != self.D + 1:
            raise ContractError(
                f"coordinates have {coordinates.shape[1]} columns; a manager of D={self.D} takes "
                f"{self.D + 1}, batch index first."
            )

    def insert_field(self, coordinates, tensor_stride, string_id=""):
        """Enter the float coordinates [N, D + 1] of points; returns a field key."""
        self._check(coordinates)
        stride = tuple(convert_to_int_list(tensor_stride, self.D))
        return CoordinateMapKey.of(manager.insert_field(self._manager, coordinates, stride, string_id))

    def field_to_sparse_insert_and_map(self, field_map_key, sparse_tensor_stride, sparse_tensor_string_id=""):
        """Voxelise a field: (key, (unique map, inverse map)), int64."""
        stride = tuple(convert_to_int_list(sparse_tensor_stride, self.D))
        key, first, inverse = manager.voxelize(
            self._manager, self._given(field_map_key), stride, sparse_tensor_string_id
        )
        return CoordinateMapKey.of(key), (inverse if first is None else first, inverse)

    def exists_field_to_sparse(self, field_map_key, sparse_map_key):
        """Whether the map between a field and a sparse map is known."""
        return self._given(sparse_map_key) in self._manager.field(self._given(field_map_key)).rows

    def field_to_sparse_keys(self, field_map_key):
        """Keys of the sparse maps that were made from a field."""
        return [CoordinateMapKey.of(k) for k in self._manager.field(self._given(field_map_key)).rows]

    def get_field_to_sparse_map(self, field_map_key, sparse_map_key):
        """The known (sparse rows, field rows), int32."""
        if not self.exists_field_to_sparse(field_map_key, sparse_map_key):
            raise ContractError(f"no map between {field_map_key} and {sparse_map_key} was made.")
        return self.field_to_sparse_map(field_map_key, sparse_map_key)

    def field_to_sparse_map(self, field_map_key, sparse_map_key):
        """(sparse rows, field rows), int32, of the points whose voxel exists."""
        rows = manager.point_rows(self._manager, self._given(field_map_key), self._given(sparse_map_key))
        points = (rows >= 0).nonzero().squeeze(1)
        return rows[points].int(), points.int()

    def get_coordinates(self, coords_key_or_tensor_strides):
        """int32 [N, D + 1], a copy."""
        return self._manager.grid(self._key(coords_key_or_tensor_strides)).coords.clone()

    def get_coordinate_field(self, coords_key_or_tensor_strides):
        """float32 [N, D + 1], a copy."""
        key = coords_key_or_tensor_strides
        if not isinstance(key, CoordinateMapKey):
            stride = tuple(convert_to_int_list(key, self.D))
            keys = sorted(k for k in self._manager.fields if k[0] == stride)
            if not keys:
                raise ContractError(f"no coordinate field has tensor stride {list(stride)}.")
            return self._manager.fields[keys[0]].coords.clone()
        return self._manager.field(key.key).coords.clone()

    def size(self, coordinate_map_key):
        """Number of rows of a map, or of a field if no map has that key."""
        key = self._given(coordinate_map_key)
        if key in self._manager.grids or key not in self._manager.fields:
            return self._manager.grid(key).n_rows
        return self._manager.fields[key].coords.shape[0]

    # maps that follow

    def stride(self, coordinate_map_key, stride, string_id=""):
        """Key of the map that is `stride` times coarser; made if there is none."""
        steps = tuple(convert_to_int_list(stride, self.D))
        return CoordinateMapKey.of(self._manager.strided(self._key(coordinate_map_key), steps, string_id))

    def stride_map(self, in_key, stride_key):
        """(rows of `in_key`, rows of `stride_key`), int64, one pair per row of `in_key`."""
        return manager.stride_pairs(self._manager, self._key(in_key), self._key(stride_key))

    def kernel_map(
        self,
        in_key,
        out_key,
        stride=1,
        kernel_size=3,
        dilation=1,
        region_type=RegionType.HYPER_CUBE,
        region_offset=None,
        is_transpose=False,
        is_pool=False,
    ):
        """{offset index: int32 [2, n]}, row 0 input and row 1 output rows; empty offsets absent.

        Rows are ascending in the output row; the cells of a pool whose kernel equals its stride
        are ascending in the input row.
        """
        from MinkowskiEngine.MinkowskiKernelGenerator import KernelGenerator

        generator = KernelGenerator(
            kernel_size, stride, dilation, is_transpose, region_type, region_offset, dimension=self.D
        )
        keys = self._key(in_key), self._key(out_key)
        return manager.kernel_map_pairs(self._manager, *keys, generator.spec(is_transpose), is_pool)

    def get_kernel_map(self, *args, **kwargs):
        """The old name of `kernel_map`."""
        log.warn("get_kernel_map is deprecated; use kernel_map.", DeprecationWarning)
        return self.kernel_map(*args, **kwargs)

    def origin(self):
        """Key of the map with one row (b, 0, .., 0) per batch index, ascending."""
        return CoordinateMapKey.of(batches.origin(self._manager))

    def origin_field(self):
        """The same for fields: fields and maps of a manager share their batch items."""
        return self.origin()

    def origin_map(self, key):
        """(batch indices [B], list of the rows of each batch index 0 .. max), int64."""
        return batches.item_rows(self._manager, self._key(key))

    def origin_field_map(self, key):
        """`origin_map` of a field."""
        return batches.field_rows(self._manager, self._given(key))

    def number_of_unique_batch_indices(self):
        """Number of batch items that were inserted."""
        return self._manager.grid(batches.origin(self._manager)).n_rows

    def union_map(self, in_keys, out_key):
        """int64 [2, N_i] per input (its rows, their union rows); fills in the unset `out_key`."""
        union_key, pairs = manager.union_pairs(
            self._manager, [self._given(key) for key in in_keys], out_key.is_key_set()
        )
        out_key.set_key(*union_key)
        return pairs

    def interpolation_map_weight(self, key, samples):
        """[input rows int32, sample rows int32, weights] of the corners that exist.

        samples: float [M, D + 1], absolute positions.
        """
        return manager.interpolation_pairs(self._manager, self._key(key), samples)

    def __repr__(self):
        keys = sorted(self._manager.grids)
        lines = [f"\t{key}: {self._manager.grids[key].n_rows} rows" for key in keys]
        return "\n".join([f"{self.__class__.__name__}(D={self.D})", *lines])


def new_manager(dimension, coordinates, allocator_type, minkowski_algorithm):
    """The manager of a tensor made from coordinates; `coords_man` gives it the methods of 0.4."""
    map_type = _KINDS.get(coordinates.device.type)
    return CoordinateManager(
        D=dimension,
        coordinate_map_type=map_type,
        allocator_type=allocator_type,
        minkowski_algorithm=minkowski_algorithm,
    )
