"""Operations of torch as a recorder writes them down: memory and views as they are, what is known now as a
constant, and what networks do between layers as launches of kernels of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...core.ops import pointwise
from ...kernels.maps.radix_order import radix_order
from ...kernels.ops.elementwise import elementwise
from ...kernels.ops.row_norm import MOST_CHANNELS, row_norm
from ..plugin_checks import ExportError
from .changes import changed_by, notice_aliases, require_clear, require_own
from .dense_convolutions import convolution
from .recorder import Recorder
from .row_views import check_view

_aten = torch.ops.aten
_MEMORY = {_aten.empty, _aten.new_empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty_strided}
_FILLED = {_aten.zeros: 0, _aten.new_zeros: 0, _aten.zeros_like: 0}
_FILLED |= {_aten.ones: 1, _aten.new_ones: 1, _aten.ones_like: 1}
_BY_VALUE = {_aten.full: 1, _aten.new_full: 2, _aten.full_like: 1}  # the argument that is the value
_FRESH = {_aten.lift_fresh, _aten.lift}
_SAME = {_aten.lift_fresh, _aten.lift, _aten._unsafe_view, _aten.detach}
_BINARY = ("add", "sub", "mul", "div", "maximum", "minimum", "add_", "sub_", "mul_", "div_")
_UNARY = (
    *("relu", "sigmoid", "silu", "gelu", "tanh", "exp", "elu"),
    *("relu_", "sigmoid_", "silu_", "gelu_", "tanh_", "exp_"),
)
_SORTED_BITS = {torch.int32: 31, torch.int64: 63, torch.uint8: 8, torch.int16: 15}
_COMPUTED = (torch.float16, torch.bfloat16, torch.float32)


def lower(it: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operation, after whatever computes it has been written down.

    Raises: ExportError for what no kernel of ours computes, with the module and the line.
    """
    packet, tensors = func.overloadpacket, _tensors((args, kwargs))
    result = _lowered(it, func, args, kwargs, tensors)
    made = _tensors((result,))
    if tensors and it.channels_last:
        notice_aliases(it, func, kwargs, tensors[0], result)
    if packet in _MEMORY or packet in _FILLED or packet in _BY_VALUE:
        it.holds_rows([one for one in made if one.ndim and one.shape[0] in it.rows])
        tensors = tensors if packet.__name__.endswith("_like") else []
    if tensors and not func.is_view:
        it.holds_rows(made, tensors)
    return result


def _lowered(it: Recorder, func: Any, args: Any, kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]) -> Any:
    packet = func.overloadpacket
    changed = list(changed_by(func, args, kwargs))
    for tensor, is_out in changed:
        require_own(it, tensor)
        require_clear(it, tensor)
        if is_out and any(map(it.is_written, tensors)):
            raise ExportError(f"{it.where()} calls {func}, which writes to `out`. Let the operation make its result.")
    if packet in _MEMORY:
        return _written(it, func(*args, **kwargs))
    if packet in _FILLED or packet in _BY_VALUE:
        return _filled(it, func, args, kwargs)
    if func.is_view or packet in _SAME:
        check_view(it, packet, tensors, args, result := func(*args, **kwargs))
        it.computed([], [result] if packet in _FRESH else [])
        return result
    if not any(map(it.is_written, tensors)):
        result = func(*args, **kwargs)  # of constants
        it.computed(tensors, [] if changed else _tensors((result,)))
        return result
    name = packet.__name__
    changes_constant = func._schema.is_mutable and not it.is_written(tensors[0])
    handler = None if changes_constant else _HANDLERS.get(name)
    if name in _RECTIFIED and (y := _norm_relu(it, name, tensors[0])) is not None:
        return y
    if func._schema.is_mutable:
        it.settle_before(tensors[0])
    whole = not any(tensor.is_floating_point() for tensor in tensors)
    with it.waiting() if whole and name in _PUT_OFF else contextlib.nullcontext():
        result = NotImplemented if handler is None else handler(it, name, args, kwargs)
    if result is NotImplemented:
        shapes = ", ".join(f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in tensors)
        raise ExportError(
            f"{it.where()} calls {func} of {shapes}, which no kernel of a GPU package computes. Package the part of "
            "the model without it, or compute it in the program that plays the package."
        )
    return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


_RECTIFIED = frozenset({"relu", "relu_"})
_PUT_OFF = frozenset({"index_select", "flip", "cat", "add", "sub", "mul", "clone", "_to_copy"})  # of coordinates


def _written(it: Recorder, tensor: torch.Tensor) -> torch.Tensor:
    it.index_of(tensor, written=True)
    return tensor


def _filled(it: Recorder, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """Zeros and the like: memory, and a step that fills it."""
    packet = func.overloadpacket
    like = func(*args, **kwargs) if packet in _FILLED or args else func(**kwargs)
    value = _FILLED[packet] if packet in _FILLED else args[_BY_VALUE[packet]]
    tensor = it.new(like.shape, like.dtype)
    it.fill(tensor, value)
    return tensor


def _computes(*tensors: torch.Tensor) -> bool:
    """Whether the kernel takes these dtypes together."""
    floats = [t.is_floating_point() for t in tensors]
    known = all(t.dtype in (*_COMPUTED, torch.int32, torch.int64) for t in tensors)
    return known and (all(floats) or not any(floats))


def _float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _new_like(it: Recorder, x: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory for a result, in which axes lie as those of x do."""
    if tuple(shape) != tuple(x.shape) or x.is_contiguous():
        return it.new(shape, dtype)
    order = sorted(range(x.ndim), key=x.stride, reverse=True)
    places = [order.index(axis) for axis in range(x.ndim)]
    own = it.new([shape[axis] for axis in order], dtype)
    if x.untyped_storage().data_ptr() in it.channels_last:
        it.channels_last.add(own.untyped_storage().data_ptr())
    return own.permute(places)


def _run(it: Recorder, operation: str, operands: Sequence[torch.Tensor], y: torch.Tensor) -> Any:
    if not _computes(*operands, y):
        return NotImplemented
    with it:
        return elementwise(operation, operands, y, it.target)


def _binary(it: Recorder, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    a, b = args[:2]
    if kwargs.get("alpha", 1) != 1 or kwargs.get("rounding_mode") or (name[:3] == "div" and not _float(a)):
        return NotImplemented
    if not isinstance(b, torch.Tensor):
        if isinstance(b, float) and not a.is_floating_point():
            return NotImplemented
        b = torch.tensor(b, dtype=torch.float32 if a.is_floating_point() else a.dtype)
    if not isinstance(a, torch.Tensor) or not _computes(a, b):
        return NotImplemented
    inplace = name.endswith("_")
    dtype = a.dtype if inplace or b.ndim == 0 else torch.result_type(a, b)
    y = a if inplace else _new_like(it, a, torch.broadcast_shapes(a.shape, b.shape), dtype)
    return _run(it, name.removesuffix("_"), [a, b], y)


def _unary(it: Recorder, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x, inplace = args[0], name.endswith("_")
    whole = name.removesuffix("_") != "relu" and not _float(x)  # of which torch makes floats
    if whole or kwargs.get("approximate", "none") != "none" or any(arg != 1 for arg in args[1:]):
        return NotImplemented
    return _run(it, name.removesuffix("_"), [x], x if inplace else _new_like(it, x, x.shape, x.dtype))


def _leaky(it: Recorder, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x, slope = args[0], torch.tensor(args[1] if len(args) > 1 else 0.01, dtype=torch.float32)
    return _run(it, "leaky", [x, slope], x if name.endswith("_") else _new_like(it, x, x.shape, x.dtype))


def _product(it: Recorder, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """x @ w + bias, of rows by a constant."""
    x, w = args[-2:]
    bias = args[0] if name == "addmm" else None
    scaled = set(kwargs.values()) - {1}
    constants = [w] if bias is None else [w, bias]
    if scaled or any(map(it.is_written, constants)) or not x.is_contiguous() or (bias is not None and bias.ndim != 1):
        return NotImplemented
    if not pointwise.by_kernel(x, w, bias):
        return NotImplemented
    with it:
        return pointwise.linear(x, w, bias)


def _norm(it: Recorder, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Batch norm by statistics that are known: (y, mean, invstd), of which the last two are not."""
    x, weight, bias, mean, var, training, _, eps = args
    constant = not any(it.is_written(one) for one in args[1:5] if one is not None)
    if training or mean is None or x.ndim < 2 or x.dtype not in _COMPUTED or not constant:
        return NotImplemented
    scale = torch.rsqrt(var.float() + eps) * (1.0 if weight is None else weight.float())
    vectors = mean.float(), scale, torch.zeros_like(scale) if bias is None else bias.float()
    shape = (-1, *[1] * (x.ndim - 2))
    operands, y = [x, *[one.view(shape) for one in vectors]], _new_like(it, x, x.shape, x.dtype)
    with it.waiting():
        _run(it, "norm", operands, y)
    it.norm_waits(y, operands)
    return y, mean.new_empty(0), mean.new_empty(0)


def _norm_relu(it: Recorder, name: str, x: torch.Tensor) -> torch.Tensor | None:
    """A ReLU of what a norm before it has not computed yet, in one launch; None where there is no such norm."""
    inplace = name == "relu_"
    operands = it.waiting_norm(x, inplace)
    if operands is None:
        return None
    y = x if inplace else _new_like(it, x, x.shape, x.dtype)
    with it:
        return elementwise("norm_relu", operands, y, it.target)


def _row_norm(it: Recorder, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Layer norm over the last axis: (y, mean, 1 / deviation), of which the last two are not."""
    x, shape, weight, bias, eps = args
    constant = not any(it.is_written(one) for one in (weight, bias) if one is not None)
    if (
        len(shape) != 1
        or shape[0] > MOST_CHANNELS
        or it.by_rows(x, -1)
        or x.dtype not in _COMPUTED
        or not (constant and x.is_contiguous())
    ):
        return NotImplemented
    ones = torch.ones(shape) if weight is None else weight.float()
    vectors = None if weight is None and bias is None else (ones, torch.zeros(shape) if bias is None else bias.float())
    y = it.new(x.shape, x.dtype)
    with it:
        row_norm(x.view(-1, shape[0]), vectors, eps, y.view(-1, shape[0]), it.target)
    return y, ones.new_empty(0), ones.new_empty(0)


def _padded(it: Recorder, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A constant around a dense grid."""
    x, ends, value = (*args, 0)[:3]
    if x.ndim < 3 or min(ends) < 0 or x.shape[0] in it.rows:
        return NotImplemented
    axes, shape = len(ends) // 2, list(x.shape)
    if any(it.by_rows(x, -1 - i) and any(ends[2 * i : 2 * i + 2]) for i in range(axes)):
        return NotImplemented
    for i in range(axes):
        shape[-1 - i] += ends[2 * i] + ends[2 * i + 1]
    y = it.new(shape, x.dtype)
    it.fill(y, value)
    inside = y
    for i in range(axes):
        inside = inside.narrow(x.ndim - 1 - i, ends[2 * i], x.shape[-1 - i])
    return NotImplemented if _run(it, "copy", [x], inside) is NotImplemented else y


def _copy_(it: Recorder, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return _run(it, "copy", [args[1]], args[0])


def _copied(it: Recorder, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """clone, to another dtype or both."""
    x, dtype = args[0], kwargs.get("dtype") or args[0].dtype
    if kwargs.get("memory_format") in (torch.channels_last, torch.channels_last_3d):
        return NotImplemented
    return _run(it, "copy", [x], it.new(x.shape, dtype))


def _cat(it: Recorder, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    parts = [part for part in args[0] if part.numel()]
    axis = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % parts[0].ndim
    if (
        axis == 0 or len({part.dtype for part in parts}) > 1 or any(it.by_rows(part, axis) for part in parts)
    ):  # rows behind rows that may not be there
        return NotImplemented
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    y, at = it.new(shape, parts[0].dtype), 0
    for part in parts:
        if _run(it, "copy", [part], y.narrow(axis, at, part.shape[axis])) is NotImplemented:
            return NotImplemented
        at += part.shape[axis]
    return y


def _chosen(it: Recorder, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Columns by their numbers, or all in reverse."""
    x, axis = args[0], args[1]
    axes = [axis] if name == "index_select" else [number % x.ndim for number in axis]
    if len(axes) != 1 or x.shape[axes[0]] in it.rows or (name == "index_select" and it.is_written(args[2])):
        return NotImplemented
    size = x.shape[axes[0]]
    numbers = args[2].tolist() if name == "index_select" else list(reversed(range(size)))
    shape = list(x.shape)
    shape[axes[0]] = len(numbers)
    y = it.new(shape, x.dtype)
    for at, number in enumerate(numbers):
        if _run(it, "copy", [x.narrow(axes[0], number, 1)], y.narrow(axes[0], at, 1)) is NotImplemented:
            return NotImplemented
    return y


def _sort(it: Recorder, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    keys = args[0]
    if keys.ndim != 1 or keys.dtype not in _SORTED_BITS or kwargs.get("descending") or not kwargs.get("stable"):
        return NotImplemented
    order, nothing = it.new(keys.shape, torch.int64), it.new(keys.shape, keys.dtype)
    it.storages[it.index_of(nothing)].usable = False  # nobody needs them
    bits = min(_SORTED_BITS[keys.dtype], getattr(keys, "bits", 63))
    with it:
        radix_order(keys.contiguous(), order, bits, it.target)
    return nothing, order


def _fill(it: Recorder, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x, value = args[0], 0 if name == "zero_" else args[1]
    if isinstance(value, torch.Tensor) or not x.is_contiguous():
        return NotImplemented
    it.fill(x, value)
    return x


_HANDLERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_BINARY, _binary),
    **dict.fromkeys(_UNARY, _unary),
    **dict.fromkeys(("leaky_relu", "leaky_relu_"), _leaky),
    **dict.fromkeys(("mm", "addmm"), _product),
    "native_batch_norm": _norm,
    **dict.fromkeys(("clone", "_to_copy"), _copied),
    **dict.fromkeys(("fill_", "zero_"), _fill),
    "copy_": _copy_,
    "cat": _cat,
    "convolution": convolution,
    "constant_pad_nd": _padded,
    "native_layer_norm": _row_norm,
    **dict.fromkeys(("index_select", "flip"), _chosen),
    "sort": _sort,
}
