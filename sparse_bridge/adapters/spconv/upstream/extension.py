"""spconv's compiled operations that Python code calls, on our engine: tv.Tensors in, results in the
allocator's memory, under the names that spconv gives them (`AllocKeys`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ....core.conv.epilogue import activated_
from ....errors import UnsupportedError
from .. import functional, geometry, pairs
from ..conv import ACTIVATIONS
from ._tv_tensor import Tensor, from_numpy, output, to_torch
from .extension_pools import PoolOps
from .missing import MissingParts
from .point2voxel import VoxelOps
from .tensorview import Activation

_INT32_MAX = (1 << 31) - 1


def _layer(*sizes: Sequence[int], subm: bool, transposed: bool) -> geometry.LayerGeometry:
    """sizes: of the kernel, stride, padding, dilation, output padding."""
    kernel, stride, padding, dilation, out_padding = (tuple(map(int, size)) for size in sizes)
    return geometry.LayerGeometry(kernel, stride, padding, dilation, out_padding, subm, transposed)


def _map(
    indices: Tensor, batch_size: int, input_dims: Sequence[int], layer: Any, algo: int, direct_table: bool, bound: int
) -> Any:
    """(output rows, kernel map).  bound: of the output rows, if it is above 0."""
    rows = to_torch(indices).contiguous()
    out, kmap = functional.build_map(rows, batch_size, input_dims, layer, algo, direct_table)
    if 0 < bound < len(out):
        raise UnsupportedError(
            f"the layer makes {len(out)} rows, more than num_out_act_bound ({bound}); raise it, or leave it at -1."
        )
    return out, kmap


class SpconvOps(PoolOps, VoxelOps, metaclass=MissingParts):
    """Kernel maps, pools and voxels."""

    @staticmethod
    def cumm_version() -> str:
        return "0.7.11"

    @staticmethod
    def pccm_version() -> str:
        return "0.4.16"

    @staticmethod
    def is_cpu_only_build() -> bool:
        return False

    @staticmethod
    def get_int32_max() -> int:
        return _INT32_MAX

    @staticmethod
    def get_indice_pairs(
        allocator: Any,
        indices: Tensor,
        batch_size: int,
        input_dims: list[int],
        algo: int,
        ksize: list[int],
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        out_padding: list[int],
        subm: bool,
        transposed: bool,
        stream_int: int = 0,
        num_out_act_bound: int = -1,
        num_input_act_bound: int = -1,
    ) -> int:
        """Pair lists; returns the number of output rows.

        Leaves PairFwd int32 [2, V, N], IndiceNumPerLoc int32 [V] and, if not subm, OutIndices.
        """
        layer = _layer(ksize, stride, padding, dilation, out_padding, subm=subm, transposed=transposed)
        out, kmap = _map(indices, batch_size, input_dims, layer, algo, False, num_out_act_bound)
        pair_lists, counts = pairs.indice_pairs(kmap, indices.dim(0), subm)
        allocator.put("PairFwd", pair_lists)
        allocator.put("IndiceNumPerLoc", counts)
        if not subm:
            allocator.put("OutIndices", out)
        return len(out)

    @staticmethod
    def get_indice_pairs_implicit_gemm(
        allocator: Any,
        indices: Tensor,
        batch_size: int,
        input_dims: list[int],
        algo: int,
        ksize: list[int],
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        out_padding: list[int],
        subm: bool,
        transposed: bool,
        is_train: bool,
        stream_int: int = 0,
        num_out_act_bound: int = -1,
        timer: Any = None,
        direct_table: bool = False,
        do_sort: bool = True,
        preallocated: Any = None,
    ) -> tuple[Tensor, int]:
        """Tables; returns the masks of the splits, uint32 [1], and the number of output rows.

        Leaves PairFwd int32 [V, M], PairMask [1, M, words] (without the last axis up to 32
        offsets), MaskArgSort [1, M], IndiceNumPerLoc [V], and where they differ from those,
        OutIndices [M, 1 + nd], PairBwd [V, N], PairMaskBwd, MaskArgSortBwd.
        """
        layer = _layer(ksize, stride, padding, dilation, out_padding, subm=subm, transposed=transposed)
        out, kmap = _map(indices, batch_size, input_dims, layer, algo, direct_table, num_out_act_bound)
        fwd, bwd = pairs.tables_of(kmap)
        _put_table(allocator, "", fwd, do_sort)
        allocator.put("IndiceNumPerLoc", (fwd >= 0).sum(1, dtype=torch.int32))
        if not subm:
            allocator.put("OutIndices", out)
        if not subm or is_train:
            _put_table(allocator, "Bwd", bwd, do_sort)
        masks = np.array([(1 << min(32, len(fwd))) - 1], dtype=np.uint32)
        return from_numpy(masks), len(out)


def _put_table(allocator: Any, suffix: str, table: torch.Tensor, do_sort: bool) -> None:
    masks, order = pairs.masks_and_order(table, do_sort)
    flat = masks[:, 0] if masks.shape[1] == 1 else masks
    allocator.put("PairFwd" if not suffix else "PairBwd", table)
    allocator.put(f"PairMask{suffix}", flat.contiguous()[None])
    allocator.put(f"MaskArgSort{suffix}", order[None])


class ConvGemmOps(metaclass=MissingParts):
    """Products; the results lie in the allocator as OutFeatures, DIn and DFilters."""

    @staticmethod
    def get_compute_capability(index: int = -1) -> tuple[int, int]:
        if not torch.cuda.is_available():
            return 0, 0
        return torch.cuda.get_device_capability(None if index < 0 else index)

    @staticmethod
    def indice_conv(
        allocator: Any,
        ext_mm: Any,
        gemm_tuner: Any,
        all_w_is_krsc: bool,
        filter_hwio: bool,
        features: Tensor,
        filters: Tensor,
        indice_pairs: Tensor,
        indice_pair_num: Tensor,
        arch: tuple[int, int],
        num_activate_out: int,
        inverse: bool = False,
        subm: bool = False,
        algo: int = 0,
        stream_int: int = 0,
        bias: Tensor | None = None,
        act_alpha: float = 0.0,
        act_beta: float = 0.0,
        act_type: Any = Activation.None_,
        use_tf32: bool = True,
    ) -> None:
        _krsc(all_w_is_krsc, filter_hwio)
        x = to_torch(features)
        kmap = pairs.map_from_pairs(
            to_torch(indice_pairs), to_torch(indice_pair_num), len(x), num_activate_out, subm, inverse
        )
        y = functional.convolution(x, to_torch(filters), kmap, _optional(bias), act_alpha, act_type)
        allocator.put("OutFeatures", y)

    @staticmethod
    def indice_conv_backward(
        allocator: Any,
        ext_mm: Any,
        gemm_tuner: Any,
        all_w_is_krsc: bool,
        filter_hwio: bool,
        features: Tensor,
        filters: Tensor,
        out_bp: Tensor,
        indice_pairs: Tensor,
        indice_pair_num: Tensor,
        arch: tuple[int, int],
        inverse: bool = False,
        subm: bool = False,
        algo: int = 0,
        stream_int: int = 0,
        use_tf32: bool = True,
    ) -> None:
        _krsc(all_w_is_krsc, filter_hwio)
        x, dy = to_torch(features), to_torch(out_bp)
        counts = to_torch(indice_pair_num)
        kmap = pairs.map_from_pairs(to_torch(indice_pairs), counts, len(x), len(dy), subm, inverse)
        _put_gradients(allocator, functional.conv_backward(x, to_torch(filters), kmap, dy))

    @staticmethod
    def implicit_gemm(
        allocator: Any,
        conv_tuner: Any,
        features: Tensor,
        filters: Tensor,
        pair_fwd: Tensor,
        pair_mask_fwd_splits: list[Tensor],
        mask_argsort_fwd_splits: list[Tensor],
        num_activate_out: int,
        masks: Tensor,
        arch: tuple[int, int],
        is_train: bool = False,
        is_subm: bool = False,
        stream_int: int = 0,
        timer: Any = None,
        auto_fp32_accum: bool = True,
        fp32_accum: bool = False,
        bias: Tensor | None = None,
        act_alpha: float = 0.0,
        act_beta: float = 0.0,
        act_type: Any = Activation.None_,
        use_tf32: bool = True,
        output_scale: float = 1.0,
        scale: Tensor | None = None,
        output_add: Tensor | None = None,
        output_add_scale: float = 1.0,
        output_dtype: int = -1,
    ) -> int:
        """Returns the mask width, which is -1: no mask is kept for the backward pass."""
        for int8_operand in (scale, output_add):
            if _optional(int8_operand) is not None:
                raise UnsupportedError("int8 kernels are not here; implicit_gemm got int8 scales.")
        x = to_torch(features)
        kmap = pairs.map_from_table(to_torch(pair_fwd), len(x), num_activate_out)
        y = functional.convolution(x, to_torch(filters), kmap, _optional(bias), act_alpha, act_type)
        allocator.put("OutFeatures", y)
        return -1

    @staticmethod
    def implicit_gemm_backward(
        allocator: Any,
        conv_tuner: Any,
        features: Tensor,
        filters: Tensor,
        out_bp: Tensor,
        pair_fwd: Tensor,
        pair_bwd: Tensor,
        pair_mask_fwd_splits: list[Tensor],
        pair_mask_bwd_splits: list[Tensor],
        mask_argsort_fwd_splits: list[Tensor],
        mask_argsort_bwd_splits: list[Tensor],
        mask_output_fwd: Tensor,
        masks: Tensor,
        arch: tuple[int, int],
        mask_width: int,
        is_subm: bool,
        stream_int: int = 0,
        timer: Any = None,
        auto_fp32_accum: bool = True,
        fp32_accum: bool = False,
        use_tf32: bool = True,
    ) -> None:
        x, dy = to_torch(features), to_torch(out_bp)
        kmap = pairs.map_from_table(to_torch(pair_fwd), len(x), len(dy))
        _put_gradients(allocator, functional.conv_backward(x, to_torch(filters), kmap, dy))


def _put_gradients(allocator: Any, gradients: tuple[torch.Tensor, ...]) -> None:
    for name, gradient in zip(("DIn", "DFilters"), gradients, strict=True):
        allocator.put(name, gradient)


def _optional(tensor: Any) -> torch.Tensor | None:
    """An optional tensor; upstream passes an empty one for none."""
    if tensor is None or tensor.empty():
        return None
    return to_torch(tensor)


def _krsc(all_w_is_krsc: bool, filter_hwio: bool) -> None:
    if not all_w_is_krsc or filter_hwio:
        raise UnsupportedError("weights of older layouts; pass KRSC with all_w_is_krsc=True.")


class InferenceOps(metaclass=MissingParts):
    """Bias and activation, in place."""

    @staticmethod
    def bias_add_inplace(out: Tensor, bias: Tensor, stream: int = 0) -> None:
        output(out).add_(to_torch(bias))

    @staticmethod
    def activation_inplace(out: Tensor, act_type: Any, alpha: float, beta: float, stream: int = 0) -> None:
        activated_(output(out), ACTIVATIONS[act_type.name], alpha)

    @staticmethod
    def bias_add_act_inplace(
        out: Tensor,
        bias: Tensor,
        act_type: Any = Activation.None_,
        alpha: float = 0.0,
        beta: float = 0.0,
        stream: int = 0,
    ) -> None:
        InferenceOps.bias_add_inplace(out, bias, stream)
        InferenceOps.activation_inplace(out, act_type, alpha, beta, stream)


class CompileInfo(metaclass=MissingParts):
    """Nothing is compiled ahead of time, and every architecture is compiled for when it is met."""

    @staticmethod
    def get_compiled_cuda_arch() -> list[tuple[int, int]]:
        return []

    @staticmethod
    def get_compiled_cuda_version() -> tuple[int, int]:
        version = torch.version.cuda
        return (0, 0) if version is None else tuple(map(int, version.split(".")[:2]))  # type: ignore[return-value]

    @staticmethod
    def arch_is_compiled(arch: tuple[int, int]) -> bool:
        return False

    @staticmethod
    def arch_is_compatible(arch: tuple[int, int]) -> bool:
        return True

    get_compiled_gemm_cuda_arch = get_compiled_cuda_arch
    arch_is_compiled_gemm = arch_is_compiled
    arch_is_compatible_gemm = arch_is_compatible


__all__ = ["CompileInfo", "ConvGemmOps", "InferenceOps", "SpconvOps"]
