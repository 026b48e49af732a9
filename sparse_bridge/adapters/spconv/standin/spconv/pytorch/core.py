"""`SparseConvTensor` and the records of `indice_dict`."""

import numpy as np
import torch
from spconv import constants
from spconv.constants import SPCONV_FX_TRACE_MODE as SPCONV_FX_TRACE_MODE
from spconv.core import ConvAlgo as ConvAlgo
from spconv.pytorch.constants import PYTORCH_VERSION as PYTORCH_VERSION
from spconv.tools import CUDAKernelTimer
from torch.fx import ProxyableClassMeta

from sparse_bridge.adapters.spconv.dense import dense
from sparse_bridge.adapters.spconv.tensors import add_in_place, assign_features, selected, summed_features
from sparse_bridge.adapters.spconv.tracing import proxy_in
from sparse_bridge.core.arguments import expect_tensors
from sparse_bridge.errors import ContractError, DataTypeError, ShapeError


class SpConvTensorMeta(ProxyableClassMeta):
    """Lets torch.fx trace functions that construct a `SparseConvTensor`."""

    def __call__(cls, *args, **kwargs):
        # torch's own test for tracing complains when it is asked outside of tracing.
        if proxy_in((*args, *kwargs.values())) is not None:
            return super().__call__(*args, **kwargs)
        return type.__call__(cls, *args, **kwargs)


class ThrustSortAllocator:
    """Growable scratch memory. `alloc(nbytes)` returns an address, valid until the next call."""

    def __init__(self, device):
        self.device = device
        self.alloced_objs = {}

    def alloc(self, n):
        buffer = self.alloced_objs.get("buffer")
        if buffer is None or buffer.numel() < n:
            buffer = self.alloced_objs["buffer"] = torch.empty(n, dtype=torch.uint8, device=self.device)
        return buffer.data_ptr()


class IndiceData:
    """A kernel map as pair lists.

    indice_pairs: int32 [2, V, N], padded with -1.  indice_pair_num: int32 [V].
    """

    def __init__(
        self,
        out_indices,
        indices,
        indice_pairs,
        indice_pair_num,
        spatial_shape,
        out_spatial_shape,
        is_subm,
        algo,
        ksize,
        stride,
        dilation,
        padding,
        voxel_num=None,
    ):
        self.out_indices = out_indices
        self.indices = indices
        self.indice_pairs = indice_pairs
        self.indice_pair_num = indice_pair_num
        self.spatial_shape = spatial_shape
        self.out_spatial_shape = out_spatial_shape
        self.is_subm = is_subm
        self.algo = algo
        self.ksize = ksize
        self.stride = stride
        self.dilation = dilation
        self.padding = padding
        self.voxel_num = voxel_num


class ImplicitGemmIndiceData:
    """A kernel map as tables, with masks of the offsets that are there.

    pair_fwd: int32 [V, M], input row of each output row.  pair_bwd: int32 [V, N], the reverse.
    """

    def __init__(
        self,
        out_indices,
        indices,
        pair_fwd,
        pair_bwd,
        pair_mask_fwd_splits,
        pair_mask_bwd_splits,
        mask_argsort_fwd_splits,
        mask_argsort_bwd_splits,
        masks,
        spatial_shape,
        out_spatial_shape,
        is_subm,
        algo,
        ksize,
        stride,
        dilation,
        padding,
        in_voxel_num=None,
        out_voxel_num=None,
    ):
        self.out_indices = out_indices
        self.indices = indices
        self.pair_fwd = pair_fwd
        self.pair_bwd = pair_bwd
        self.pair_mask_fwd_splits = pair_mask_fwd_splits
        self.pair_mask_bwd_splits = pair_mask_bwd_splits
        self.mask_argsort_fwd_splits = mask_argsort_fwd_splits
        self.mask_argsort_bwd_splits = mask_argsort_bwd_splits
        self.masks = masks
        self.spatial_shape = spatial_shape
        self.out_spatial_shape = out_spatial_shape
        self.is_subm = is_subm
        self.algo = algo
        self.ksize = ksize
        self.stride = stride
        self.dilation = dilation
        self.padding = padding
        self.in_voxel_num = in_voxel_num
        self.out_voxel_num = out_voxel_num


def scatter_nd(indices, updates, shape):
    """Zeros of `shape` with `updates` written at `indices` [..., k]; the last write wins."""
    expect_tensors("scatter_nd", indices=indices, updates=updates)
    result = torch.zeros(*shape, dtype=updates.dtype, device=updates.device)
    index = indices.reshape(-1, indices.shape[-1]).long()
    result[tuple(index.t())] = updates.reshape(index.shape[0], *shape[indices.shape[-1] :])
    return result


def expand_nd(ndim, val, name=""):
    """`val` as a list of `ndim` ints: an int is repeated, anything else must hold that many. name: of the argument,
    for errors."""
    name = f"{name}: " if name else ""
    if isinstance(val, int):
        return [int(val)] * ndim
    try:
        items = [int(item) for item in val]
    except (TypeError, ValueError):
        raise DataTypeError(
            f"{name}expected an int or a sequence of {ndim} ints, got {type(val).__name__}: {val!r}"
        ) from None
    if len(items) != ndim:
        raise ContractError(f"{name}expected {ndim} values, got {len(items)}: {items}")
    return items


def _spatial_list(shape):
    if not hasattr(shape, "__iter__"):
        raise DataTypeError(f"spatial_shape is {shape!r}; expected one extent per axis, such as [41, 1600, 1408].")
    return [int(size) for size in (shape.tolist() if hasattr(shape, "tolist") else shape)]


class SparseConvTensor(metaclass=SpConvTensorMeta):
    """Sparse features on a grid.

    features: [N, C].  indices: int32 [N, 1 + nd], batch index first.
    spatial_shape: nd sizes, any kind of sequence.  batch_size: number of batch items.
    indice_dict: kernel maps by `indice_key`.
    """

    _switches = constants

    def __init__(
        self,
        features,
        indices,
        spatial_shape,
        batch_size,
        grid=None,
        voxel_num=None,
        indice_dict=None,
        benchmark=False,
        permanent_thrust_allocator=False,
        enable_timer=False,
        force_algo=None,
    ):
        spatial_shape = _spatial_list(spatial_shape)
        if not constants.SPCONV_FX_TRACE_MODE:
            _check(features, indices, spatial_shape, batch_size)
        self._features = features
        self.indices = indices
        self.spatial_shape = spatial_shape
        self.batch_size = batch_size
        self.indice_dict = {} if indice_dict is None else indice_dict
        self.grid = torch.Tensor() if grid is None else grid
        self.voxel_num = voxel_num
        self.benchmark = benchmark
        self.benchmark_record = {}
        self.thrust_allocator = ThrustSortAllocator(features.device) if permanent_thrust_allocator else None
        self._timer = CUDAKernelTimer(enable_timer)
        self.force_algo = force_algo
        self.int8_scale = None

    def __repr__(self):
        return f"SparseConvTensor[shape={self._features.shape}]"

    @property
    def features(self):
        return self._features

    @features.setter
    def features(self, value):
        # spconv 2.x refuses; 1.x projects assign, and nothing can depend on the refusal.
        assign_features(self, value)

    @property
    def is_quantized(self):
        return self._features.dtype == torch.qint8

    @property
    def spatial_size(self):
        return np.prod(self.spatial_shape)

    @property
    def sparity(self):
        """Share of active cells (the name is spconv 1.x's)."""
        return self.indices.shape[0] / np.prod(self.spatial_shape) / self.batch_size

    def q_scale(self):
        if not self.is_quantized:
            raise ValueError("q_scale() is for quantised tensors.")
        return self._features.q_scale()

    def dequantize(self):
        return self.replace_feature(self._features.dequantize())

    def replace_feature(self, feature):
        """The same coordinates with other features [M, C]; M may differ from the coordinates' N.

        Shares `indices` and `indice_dict`.
        """
        if not constants.SPCONV_FX_TRACE_MODE and (not isinstance(feature, torch.Tensor) or feature.ndim != 2):
            expect_tensors("replace_feature", feature=feature)
            raise ShapeContractError(f"features {list(feature.shape)}; expected [N, C].")
        result = SparseConvTensor.__new__(SparseConvTensor)
        result._features = feature
        result.indices = self.indices
        result.spatial_shape = list(self.spatial_shape)
        result.batch_size = self.batch_size
        result.indice_dict = self.indice_dict
        result.grid = self.grid
        result.voxel_num = self.voxel_num
        result.benchmark = self.benchmark
        result.benchmark_record = self.benchmark_record
        result.thrust_allocator = self.thrust_allocator
        result._timer = self._timer
        result.force_algo = self.force_algo
        result.int8_scale = self.int8_scale
        return result

    def shadow_copy(self):
        return self.replace_feature(self._features)

    def select_by_index(self, valid_indices):
        """The chosen rows, with no kernel maps."""
        return selected(self, valid_indices)

    def minus(self):
        return self.replace_feature(-self._features)

    @classmethod
    def from_dense(cls, x):
        """The coordinates of a channels-last dense [B, *shape, C] with any value that is not zero.

        Rows are in lexicographic order.
        """
        expect_tensors("from_dense", x=x)
        sparse = x.to_sparse(x.ndim - 1)
        indices = sparse.indices().permute(1, 0).contiguous().int()
        return cls(sparse.values(), indices, x.shape[1:-1], x.shape[0])

    def find_indice_pair(self, key):
        if key is None:
            return None
        return self.indice_dict.get(key)

    def dense(self, channels_first=True):
        """[B, C, *shape], or [B, *shape, C]; differentiable.

        Of rows that share coordinates one stays; negative indices count from the end, as in Python.
        Raises an IndexError for coordinates outside the grid.
        """
        return dense(self, channels_first)

    def __add__(self, other):
        return self.replace_feature(summed_features(self, other))

    __radd__ = __add__

    def __iadd__(self, other):
        return add_in_place(self, other)


def _check(features, indices, spatial_shape, batch_size):
    expect_tensors("SparseConvTensor", features=features, indices=indices)
    if features.ndim != 2 or indices.ndim != 2:
        raise ShapeContractError(
            f"features {list(features.shape)} and indices {list(indices.shape)}; expected [N, C] and [N, 1 + nd]."
        )
    if len(spatial_shape) != indices.shape[1] - 1:
        raise ShapeContractError(
            f"spatial_shape {spatial_shape} must equal ndim: indices have {indices.shape[1]} columns, the first is the "
            f"batch index, {indices.shape[1] - 1} are spatial."
        )
    if features.layout is not torch.strided:
        raise ContractError(f"features have layout {features.layout}; expected a dense tensor (use .to_dense()).")
    if indices.dtype != torch.int32:
        raise ContractError(f"only int32 indices are supported, got {indices.dtype}; use indices.int().")
    if batch_size is None or isinstance(batch_size, str):
        raise DataTypeError(f"batch_size is {batch_size!r}; expected how many batch items there are, 1 or more.")
    if not batch_size > 0:
        raise ContractError(f"batch_size is {batch_size}; expected at least 1.")


class ShapeContractError(ContractError, ShapeError):
    """A tensor of the wrong rank or a spatial shape of the wrong length."""
