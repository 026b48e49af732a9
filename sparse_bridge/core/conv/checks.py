"""What the tensors of a convolution must be."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import DataTypeError, DeviceError, ShapeError
from ..arguments import expect, expect_tensors
from ..geometry.weights import WeightLayout
from ..maps.kernel_map import KernelMap
from .epilogue import Epilogue, Norm

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_operands(kmap: Any, norm: Any, **tensors: Any) -> None:
    """Raises: DataTypeError for operands of which one is no tensor, the map none, or the norm none."""
    expect_tensors("conv", **tensors)
    expect(KernelMap, kmap=kmap)
    if norm is not None:
        expect(Norm, norm=norm)


def check_devices(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kmap: KernelMap) -> None:
    """Check that features of any dtype are a matrix [N, C], and on one device with weight, bias and map.

    Raises: ShapeError, DeviceError.
    """
    if x.ndim != 2:
        raise ShapeError(f"features have shape {list(x.shape)}; expected [N, C].")
    device = kmap.device
    if x.device != device or weight.device != device or (bias is not None and bias.device != device):
        bias_device = "" if bias is None else f", the bias on {bias.device}"
        raise DeviceError(
            f"features are on {x.device}, the weight on {weight.device}{bias_device}, the coordinates on "
            f"{device}; move them all to one device."
        )


def check(x: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue, kmap: KernelMap, w: WeightLayout) -> WeightLayout:
    """`w`, how the weight is read, once operands and map fit together.

    x: [N_in, C_in], fp16 / bf16 / fp32 / fp64.  weight: of x's dtype, as `w` reads it.  bias: [C_out], of any of
    these dtypes.
    Raises: ShapeError for rows, channels, offsets, a bias or vectors of a norm that do not fit, or vectors of a norm
        on another device; DataTypeError.
    """
    n_in = kmap.rulebook.n_rows[1 - kmap.side] if kmap.x_fold is None else kmap.n_in
    if x.shape[0] != n_in:
        raise ShapeError(
            f"features have {x.shape[0]} rows, but the kernel map was built for {n_in}; "
            "features and coordinates must be row-aligned."
        )
    if x.shape[1] != w.columns_in:
        raise ShapeError(
            f"features have {x.shape[1]} channels, the weight expects {w.columns_in} ({w.groups} group(s) of {w.c_in})."
        )
    if w.n_offsets != kmap.n_offsets:
        raise ShapeError(f"the weight has {w.n_offsets} matrices, the kernel map {kmap.n_offsets} offsets.")
    if x.dtype not in FLOATS:
        raise DataTypeError(f"features are {x.dtype}; expected one of fp16, bf16, fp32, fp64 (use .float()).")
    if x.dtype != weight.dtype:
        raise DataTypeError(
            f"features are {x.dtype} and the weight is {weight.dtype}; convert one, or use torch.autocast."
        )
    bias, norm = epilogue.bias, epilogue.norm
    if bias is not None and bias.shape != (w.columns_out,):
        raise ShapeError(f"bias has shape {list(bias.shape)}; expected [{w.columns_out}].")
    if bias is not None and bias.dtype not in FLOATS:
        raise DataTypeError(f"bias is {bias.dtype}; expected one of fp16, bf16, fp32, fp64.")
    if norm is not None:
        _check_norm(norm, w, x.device)
    return w


def like_result(
    residual: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The residual [N_out, C_out] of a result of this shape and float dtype, contiguous.

    Raises: ShapeError, DataTypeError (no cast is made), DeviceError.
    """
    check_like_result(residual, shape, dtype, device)
    return residual.contiguous()


def check_like_result(residual: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    """Check that a residual has shape, float dtype and device of the result. Raises: what `like_result` does."""
    if tuple(residual.shape) != shape:
        raise ShapeError(f"the residual has shape {list(residual.shape)}; expected that of the result, {list(shape)}.")
    if residual.dtype != dtype:
        raise DataTypeError(f"the residual is {residual.dtype}, the result {dtype}; convert it.")
    if residual.device != device:
        raise DeviceError(f"the residual is on {residual.device}, the result on {device}; move it.")


def _check_norm(norm: Norm, w: WeightLayout, device: torch.device) -> None:
    for vector in norm[:4]:
        if vector is None:
            continue
        expect_tensors("conv", norm=vector)
        if vector.shape != (w.columns_out,) or vector.device != device:
            raise ShapeError(
                f"a vector of the norm is {list(vector.shape)} on {vector.device}; expected "
                f"[{w.columns_out}] on {device}."
            )
    if (norm.weight is None) != (norm.bias is None):
        raise ShapeError("the norm has only one of weight and bias; give both or none.")
