"""`CoordsKey` and `CoordsManager`, the coordinate management of MinkowskiEngine 0.4.

They are the key and the manager of 0.5 with the methods of 0.4; either kind goes wherever a key or
a manager is asked for.
"""

import math

import torch
from MinkowskiEngine.MinkowskiCommon import convert_to_int_list
from MinkowskiEngine.MinkowskiCoordinateManager import CPU_COUNT, CoordinateManager, set_memory_manager_backend
from MinkowskiEngineBackend._C import MemoryManagerBackend, RegionType

from sparse_bridge.adapters.minkowski import batches, profile
from sparse_bridge.adapters.minkowski.upstream.arguments import arguments_of_0_4
from sparse_bridge.adapters.minkowski.upstream.keys import CoordsKey
from sparse_bridge.errors import ContractError

__all__ = ["CPU_COUNT", "CoordsKey", "CoordsManager", "MemoryManagerBackend", "save_ctx", "set_memory_manager_backend"]


def save_ctx(ctx, tensor_stride, stride, kernel_size, dilation, region_type, in_coords_key, out_coords_key, coords_man):
    """Keep what a backward pass of a custom autograd function needs."""
    ctx.tensor_stride, ctx.stride, ctx.kernel_size = tensor_stride, stride, kernel_size
    ctx.dilation, ctx.region_type = dilation, region_type
    ctx.in_coords_key, ctx.out_coords_key, ctx.coords_man = (in_coords_key, out_coords_key, coords_man)
    return ctx


class CoordsManager(CoordinateManager):
    """CoordsManager(D=...): the maps that tensors of one network share.

    Keys are CoordsKeys; `_or_tensor_strides` arguments also take a tensor stride. Coordinates and
    maps are returned on the CPU, as the manager of 0.4 kept them.  memory_manager_backend: a
    MemoryManagerBackend, which changes nothing.
    """

    def __init__(self, num_threads=-1, memory_manager_backend=None, D=-1, **options):
        profile.saw_old("CoordsManager(...)")
        options.setdefault("allocator_type", memory_manager_backend)
        super().__init__(D=D, num_threads=num_threads, **options)

    def _get_coords_key(self, key_or_tensor_strides):
        """The CoordsKey for a key or a tensor stride. Raises ContractError, KeyStateError."""
        return CoordsKey.of(self._key(key_or_tensor_strides))

    def get_coords_key(self, tensor_strides):
        """The CoordsKey of the first map of a tensor stride. Raises ContractError."""
        return self._get_coords_key(convert_to_int_list(tensor_strides, self.D))

    # making maps

    def create_coords_key(
        self,
        coords,
        tensor_stride=1,
        force_creation=False,
        force_remap=False,
        allow_duplicate_coords=False,
        return_inverse=False,
    ):
        """CoordsKey of a new map of int32 coordinates [N, D + 1]; with `return_inverse`
        (key, (unique map, inverse map)). Rows that share a coordinate are merged."""
        key = CoordsKey(self.D)
        key.setTensorStride(tensor_stride)
        maps = self.initialize(coords, key, force_creation, force_remap, allow_duplicate_coords, return_inverse)
        return (key, maps) if return_inverse else key

    def initialize(
        self,
        coords,
        coords_key,
        force_creation=False,
        force_remap=False,
        allow_duplicate_coords=False,
        return_inverse=False,
    ):
        """Enter coordinates under a key, which is set: (unique map, inverse map), int64; the second
        is empty without `return_inverse`. The other options change nothing: a map is always new,
        and rows that share a coordinate are always merged.

        Raises: CoordinateTypeError, ContractError.
        """
        map_key, (unique, inverse) = self.insert_and_map(coords, coords_key.getTensorStride())
        coords_key.set_key(map_key.get_key())
        return unique, inverse if return_inverse else inverse[:0]

    def stride(self, coords_key, stride, force_creation=False):
        """CoordsKey of the map that is `stride` times coarser: the one that is known unless
        `force_creation`, otherwise a new one."""
        name = self._manager.tag() if force_creation else ""
        return CoordsKey.of(super().stride(coords_key, stride, name).key)

    def transposed_stride(self, coords_key, stride, kernel_size, dilation, force_creation=False):
        """CoordsKey of the map that is `stride` times finer: the one that is known unless
        `force_creation`, otherwise all that the kernel reaches."""
        from MinkowskiEngine.MinkowskiKernelGenerator import KernelGenerator

        generator = KernelGenerator(
            kernel_size, stride, dilation, True, expand_coordinates=force_creation, dimension=self.D
        )
        return CoordsKey.of(self._manager.output_key(self._key(coords_key), generator.spec(True)))

    def reduce(self):
        """CoordsKey of the map with one row (b, 0, .., 0) per batch item."""
        return CoordsKey.of(batches.origin(self._manager))

    def set_origin_coords_key(self, coords_key):
        """The map with one row per batch item, whose rows must be those of `coords_key`."""
        if self.get_coords(coords_key).tolist() != self.get_coords(self.reduce()).tolist():
            raise ContractError("the origin has one row (b, 0, .., 0) per batch item, ascending.")

    # what maps hold

    def get_coords(self, coords_key_or_tensor_strides):
        """int32 [N, D + 1] on the CPU."""
        return self.get_coordinates(coords_key_or_tensor_strides).cpu()

    def get_coords_size_by_coords_key(self, coords_key):
        """Number of rows."""
        return self._manager.grid(self._key(coords_key)).n_rows

    def get_batch_size(self):
        """Number of batch items."""
        return len(batches.batches(self._manager))

    def get_batch_indices(self):
        """Set of the batch indices."""
        return set(batches.batches(self._manager).tolist())

    def get_row_indices_per_batch(self, coords_key, out_coords_key=None):
        """List of int64 row tensors, one per batch index that was entered, ascending."""
        items = batches.item_rows(self._manager, self._key(coords_key))
        return [rows.cpu() for rows in batches.existing(items)]

    def get_row_indices_at(self, coords_key, batch_index):
        """int64 rows of one batch index, -1 for the last. Raises ItemIndexError."""
        items = batches.item_rows(self._manager, self._key(coords_key))
        return batches.rows_at(items, batch_index).cpu()

    # how maps relate

    def get_kernel_map(
        self,
        in_key_or_tensor_strides,
        out_key_or_tensor_strides,
        stride=1,
        kernel_size=3,
        dilation=1,
        region_type=RegionType.HYPERCUBE,
        region_offset=None,
        is_transpose=False,
        is_pool=False,
        on_gpu=False,
    ):
        """(input rows, output rows): two lists of int32 tensors, one per kernel offset.

        on_gpu: leave them on the manager's device.
        """
        kernel_map = self.kernel_map(
            in_key_or_tensor_strides,
            out_key_or_tensor_strides,
            stride,
            kernel_size,
            dilation,
            region_type,
            region_offset,
            is_transpose,
            is_pool,
        )
        size = convert_to_int_list(kernel_size, self.D)
        volume = math.prod(size) if region_offset is None else len(region_offset)
        if RegionType(region_type) is RegionType.HYPERCROSS:
            volume = 1 + sum(k - 1 for k in size)
        none = torch.empty((2, 0), dtype=torch.int32)
        pairs = [kernel_map.get(offset, none) for offset in range(volume)]
        if not on_gpu:
            pairs = [pair.cpu() for pair in pairs]
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]

    def get_coords_map(self, in_key_or_tensor_strides, out_key_or_tensor_strides):
        """(input rows, output rows), int64 on the CPU: every row and the coarser one holding it."""
        pairs = self.stride_map(in_key_or_tensor_strides, out_key_or_tensor_strides)
        return tuple(rows.cpu() for rows in pairs)

    def get_mapping_by_coords_key(self, in_coords_key, out_coords_key):
        """int64 [N]: the coarser row that holds each row, -1 for none."""
        keys = self._key(in_coords_key), self._key(out_coords_key)
        return self._manager.parent_rows(*keys).cpu()

    def get_mapping_by_tensor_strides(self, in_tensor_strides, out_tensor_strides):
        """`get_mapping_by_coords_key` of the first maps of two tensor strides."""
        return self.get_mapping_by_coords_key(in_tensor_strides, out_tensor_strides)

    def get_union_map(self, in_keys, out_key):
        """(lists of the rows of each map, of their union rows), int32; fills in `out_key`."""
        pairs = [pair.int().cpu() for pair in self.union_map(in_keys, out_key)]
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]

    @arguments_of_0_4(
        "label max_label target_tensor_stride label_tensor_stride",
        also="target_coords_key=target_tensor_stride label_coords_key=label_tensor_stride",
    )
    def permute_label(self, label, max_label, target_tensor_stride, label_tensor_stride=1):
        """int64: the most frequent label (0 .. max_label - 1) of the rows that each row of the
        coarser target holds; the smallest of equals. Maps are given by tensor stride or key.

        label: integers, one per row of the map `label_tensor_stride`.
        Raises: ContractError, StrideError.
        """
        source, target = (self._get_coords_key(k) for k in (label_tensor_stride, target_tensor_stride))
        if target == source:
            return label
        label = torch.as_tensor(label).long()
        if len(label) and not 0 <= int(label.min()) <= int(label.max()) < max_label:
            raise ContractError(f"labels must lie in 0 .. {max_label - 1} (max_label).")
        rows, n_rows = self.get_mapping_by_coords_key(source, target), self.size(target)
        if len(label) != len(rows):
            raise ContractError(f"{len(label)} labels for a map of {len(rows)} rows.")
        has_cell = rows >= 0
        cells = rows[has_cell] * max_label + label.cpu()[has_cell]
        return cells.bincount(minlength=n_rows * max_label).view(n_rows, max_label).argmax(1)

    def print_diagnostics(self, coords_key=None):
        """Print the manager."""
        print(self if coords_key is None else f"{coords_key}: {len(self.get_coords(coords_key))}")  # noqa: T201
