"""Convolutions but for their scene: what a layer's call decides once and finds again by one
look-up.

The key holds everything that the decisions depend on: dtypes, devices, shape and strides of the
weight, how it is read, precision, and what follows the sum. Settings, verdicts of the self-check
and the automatic dataflow are those of `plan.memory`, which forgets all decisions when one of them
changes. What may change from call to call, rows and the map, is compared at every call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ... import settings
from ...errors import DataTypeError, DeviceError, ShapeError
from ..device import trace
from ..device.selection import forces_kernels
from ..geometry.weights import WeightLayout, layout_of
from . import plan
from .dataflows import Epilogue, Norm, gather_matmul

if TYPE_CHECKING:
    from ..maps.kernel_map import KernelMap

__all__ = ["Resolved", "known", "like_result", "resolve"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Resolved:
    """A convolution that has passed all checks that do not need the scene.

    w: how the weight is read.  dataflow, target: see `plan.choose_dataflow`, for a regular map.
    gather: the product where kernels compute it, else None.  ends: whether a norm, a residual or an
    activation follows, which have no gradient.  apart: whether values of a bias or of a norm's
    vectors are not next to each other in memory, as kernels read them.
    """

    __slots__ = (
        "_back", "_dense", "_endings", "_epoch", "_wgrad", "apart", "columns_in", "columns_out",
        "dataflow", "device", "dtype", "ends", "gather", "layout", "n_offsets", "precision",
        "target", "w",
    )  # fmt: skip

    def __init__(
        self, x: torch.Tensor, epilogue: Epilogue, w: WeightLayout, layout: tuple[str, int],
        precision: str, chosen: tuple[str, Any],
    ) -> None:  # fmt: skip
        self.w, self.layout, self.precision = w, layout, precision
        self.device, self.dtype = x.device, x.dtype
        self.n_offsets, self.columns_in, self.columns_out = w.n_offsets, w.columns_in, w.columns_out
        self.dataflow, self.target = chosen
        self.ends = any(epilogue[place] is not None for place in (1, 3, 4))
        vectors = [vector for vector in epilogue.vectors[:5] if vector is not None]
        self.apart = any(not vector.is_contiguous() for vector in vectors)
        self.gather: plan.GatherProduct | None = None
        if self.launches:
            self.gather = plan.GatherProduct.of(
                self.dataflow, self.target, self.device, self.dtype, w, epilogue, precision
            )
        self._dense: bool | None = None
        self._forget()

    def _forget(self) -> None:
        """What was found later holds as long as the settings."""
        self._back: plan.GatherProduct | None = None
        self._wgrad: dict[torch.dtype, plan.WgradProduct] = {}
        self._endings: dict[tuple[str | None, float], Resolved] = {}
        self._epoch = plan.epoch

    @property
    def launches(self) -> bool:
        """Whether kernels do the work."""
        return self.target is not None and settings.DATAFLOWS[self.dataflow]

    @property
    def lasts(self) -> bool:
        """Whether the settings alone choose the dataflow. CPU tensors take kernels when and as long
        as Triton has a driver for those."""
        return self.device.type == "cuda" or not forces_kernels()

    def forward(
        self, kmap: KernelMap, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
        activation: str | None = None, alpha: float = 0.0, norm: Norm | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """act(norm(conv + bias) + residual); see `conv`."""
        rulebook, gather = kmap.rulebook, self.gather
        if residual is not None:
            residual = like_result(
                residual, (rulebook.n_rows[kmap.side], self.columns_out), self.dtype, self.device
            )
        if gather is None or not (rulebook.regular and rulebook.n_rows[0] and rulebook.n_rows[1]):
            dataflow, target = self.chosen(kmap)
            end = Epilogue(bias, activation, alpha, norm, residual)
            y = gather_matmul(dataflow, target, kmap, x, weight, self.w, end, self.precision)
        else:
            vectors: tuple[torch.Tensor | None, ...] | None = None
            if norm is not None:
                vectors = (bias, norm[0], norm[1], norm[2], norm[3], residual)
            elif bias is not None or residual is not None:
                vectors = (bias, None, None, None, None, residual)
            if self.apart and vectors is not None:
                vectors = tuple([None if one is None else one.contiguous() for one in vectors])
            y = gather(rulebook, int(kmap.flipped), x, weight, vectors)
        if trace.recorders:
            trace.emit("conv", self.chosen(kmap)[0], kmap, self.columns_in, self.columns_out)
        return y

    def chosen(self, kmap: KernelMap) -> tuple[str, Any]:
        """(dataflow, target) for a map."""
        if kmap.rulebook.regular:
            return self.dataflow, self.target
        return "per_offset", None

    def dense(self, weight: torch.Tensor) -> bool:
        """Whether new memory like the weight's has its strides, too."""
        if self._dense is None:
            twin = torch.empty_strided(weight.shape, weight.stride(), device="meta")
            self._dense = torch.empty_like(twin).stride() == weight.stride()
        return self._dense

    def backward(
        self, wants_x: bool, result: torch.dtype | None
    ) -> tuple[plan.GatherProduct | None, plan.WgradProduct | None]:
        """(dgrad, wgrad into memory of dtype `result` laid out as the weight), where kernels
        compute them; None for what is not wanted."""
        plan.memory()
        if self._epoch != plan.epoch:
            self._forget()
        back, wgrad = self._back, None if result is None else self._wgrad.get(result)
        if wants_x and back is None:
            back = self._back = plan.GatherProduct.of(
                self.dataflow, self.target, self.device, self.dtype, self.w.transposed(),
                Epilogue(), self.precision,
            )  # fmt: skip
        if result is not None and wgrad is None:
            wgrad = self._wgrad[result] = plan.WgradProduct.of(
                self.target, self.device, self.dtype, result, self.w, self.precision
            )
        return back if wants_x else None, wgrad

    def ending(
        self, x: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue, kmap: KernelMap
    ) -> Resolved:
        """The convolution with a residual and an activation besides, for tensors that it serves."""
        plan.memory()
        if self._epoch != plan.epoch:
            self._forget()
        key = (epilogue.activation, epilogue.alpha)
        found = self._endings.get(key)
        if found is None:
            found = resolve(x, weight, epilogue, *self.layout, self.precision, kmap)
            self._endings[key] = found
        return found


def _key(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None,
    alpha: float, norm: Norm | None, summed: bool, layout: str, groups: int, precision: str,
) -> tuple[Any, ...]:  # fmt: skip
    end: tuple[Any, ...] | None = None
    if bias is not None:
        end = (bias.dtype, bias.device, bias.shape, bias.stride())
    if activation is not None or norm is not None:
        end = (end, activation, alpha)
    if norm is not None:
        mean, var, gain, beta, eps = norm
        end = (
            end, eps, mean.dtype, mean.device, mean.shape, mean.stride(), var.dtype, var.device,
            var.shape, var.stride(),
        )  # fmt: skip
        if gain is not None:
            end = (end, gain.dtype, gain.device, gain.shape, gain.stride())
        if beta is not None:
            end = (end, 0, beta.dtype, beta.device, beta.shape, beta.stride())
    if summed:
        end = (end, True)
    return (
        x.dtype, x.device, weight.dtype, weight.device, weight.shape, weight.stride(), layout,
        groups, precision, end,
    )  # fmt: skip


def known(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None,
    alpha: float, norm: Norm | None, summed: bool, layout: str, groups: int, precision: str,
    kmap: KernelMap,
) -> Resolved | None:  # fmt: skip
    """The convolution, if it was resolved before and goes with these features and this map, whose
    ends are not folded; None says nothing.  summed: a residual is added."""
    key = _key(x, weight, bias, activation, alpha, norm, summed, layout, groups, precision)
    found: Resolved | None = plan.memory().get(key)
    if found is None:
        return None
    shape, rulebook = x.shape, kmap.rulebook
    if (
        len(shape) == 2
        and shape[1] == found.columns_in
        and shape[0] == rulebook.n_rows[not kmap.flipped]
        and rulebook.n_offsets == found.n_offsets
        and rulebook.device == found.device
    ):
        return found
    return None


def resolve(
    x: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue, layout: str, groups: int,
    precision: str, kmap: KernelMap,
) -> Resolved:  # fmt: skip
    """The convolution of tensors on the map's device, resolved now unless it is known.

    Raises: ShapeError, DataTypeError, OverflowLimitError.
    """
    end = (*epilogue[:4], epilogue.residual is not None)
    found = known(x, weight, *end, layout, groups, precision, kmap)
    if found is not None:
        return found
    w, memory = check(x, weight, epilogue, kmap, layout, groups), plan.memory()
    chosen = plan.choose_dataflow(x.device, x.dtype, kmap)
    made = Resolved(x, epilogue, w, (layout, groups), precision, chosen)
    if kmap.rulebook.regular and made.lasts:
        memory[_key(x, weight, *end, layout, groups, precision)] = made
    return made


def check(
    x: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue, kmap: KernelMap, layout: str,
    groups: int,
) -> WeightLayout:  # fmt: skip
    """How the weight is read. Raises what `resolve` does."""
    w = layout_of(weight, layout, groups)
    n_in = kmap.rulebook.n_rows[1 - kmap.side] if kmap.x_fold is None else kmap.n_in
    if x.shape[0] != n_in:
        raise ShapeError(
            f"features have {x.shape[0]} rows, but the kernel map was built for {n_in}; "
            "features and coordinates must be row-aligned."
        )
    if x.shape[1] != w.columns_in:
        raise ShapeError(
            f"features have {x.shape[1]} channels, the weight expects {w.columns_in} "
            f"({w.groups} group(s) of {w.c_in})."
        )
    if w.n_offsets != kmap.n_offsets:
        raise ShapeError(
            f"the weight has {w.n_offsets} taps, the kernel map {kmap.n_offsets} offsets."
        )
    if x.dtype not in _FLOATS:
        raise DataTypeError(
            f"features are {x.dtype}; expected one of fp16, bf16, fp32, fp64 (use .float())."
        )
    if x.dtype != weight.dtype:
        raise DataTypeError(
            f"features are {x.dtype} and the weight is {weight.dtype}; convert one, or use "
            "torch.autocast."
        )
    bias, norm = epilogue.bias, epilogue.norm
    if bias is not None and bias.shape != (w.columns_out,):
        raise ShapeError(f"bias has shape {list(bias.shape)}; expected [{w.columns_out}].")
    if bias is not None and bias.dtype not in _FLOATS:
        raise DataTypeError(f"bias is {bias.dtype}; expected one of fp16, bf16, fp32, fp64.")
    if norm is not None:
        _check_norm(norm, w, x.device)
    return w


def like_result(
    residual: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The residual of a result with this shape, contiguous. Raises ShapeError, DataTypeError,
    DeviceError."""
    if tuple(residual.shape) != shape:
        raise ShapeError(
            f"the residual has shape {list(residual.shape)}; expected that of the result, "
            f"{list(shape)}."
        )
    if residual.dtype != dtype:
        raise DataTypeError(f"the residual is {residual.dtype}, the result {dtype}; convert it.")
    if residual.device != device:
        raise DeviceError(f"the residual is on {residual.device}, the result on {device}; move it.")
    return residual.contiguous()


def _check_norm(norm: Norm, w: WeightLayout, device: torch.device) -> None:
    for vector in norm[:4]:
        if vector is not None and (vector.shape != (w.columns_out,) or vector.device != device):
            raise ShapeError(
                f"a vector of the norm is {list(vector.shape)} on {vector.device}; expected "
                f"[{w.columns_out}] on {device}."
            )
    if (norm.weight is None) != (norm.bias is None):
        raise ShapeError("the norm has only one of weight and bias; give both or none.")
