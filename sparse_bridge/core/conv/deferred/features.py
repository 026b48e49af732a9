"""Features of deferred convolutions, as tensors.

Operations of `FOLLOWING` go to the convolution. Everything else that is done with such a
tensor sees what the convolution computes.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ....hooks import torch_replaced
from ....native import calls as native_calls
from ...device.torch_compat import apart, eagerly
from .conv import DeferredConv, MaybeDeferred

# What may follow: None where it does not this time.
FOLLOWING: dict[Any, Callable[..., torch.Tensor | None]] = {}


_TORCHS: list[tuple[Any, dict[str, Any]]] = [
    (F, {name: func for name, func in vars(F).items() if isinstance(func, types.FunctionType)}),
    (torch.Tensor, {name: func for base in torch.Tensor.__mro__[::-1] for name, func in vars(base).items()}),
]
_OF_C = types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType
_OF_TORCH = frozenset(func for _, names in _TORCHS for func in names.values() if type(func) is types.FunctionType)


def _of_torch(func: Any) -> Any:
    """Torch's function or method where a program has put `func` in its place. Torch hands on what has its name by
    then, which has called it and would come in twice."""
    if type(func) not in _OF_C and func not in _OF_TORCH:
        for place, names in _TORCHS:
            for name, own in names.items():
                if vars(place).get(name) is func:
                    return own
    return func


class LazyTensor:
    """A tensor of which it is still open what its values are, or who reads them. Whatever is not
    foreseen is done with plain tensors."""

    def materialize(self) -> torch.Tensor:
        """A plain tensor of the values."""
        raise NotImplementedError

    @classmethod
    @eagerly
    def on_plain(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """`func` of plain tensors."""
        func = _of_torch(func)
        return func(*materialize(args), **{name: materialize(value) for name, value in (kwargs or {}).items()})


class DeferredFeatures(LazyTensor):
    """Features [N_out, C_out] of a deferred convolution: what both kinds of tensor share."""

    conv: DeferredConv
    ndim = 2  # asked for all the time; as attributes they take no detour
    shape = property(lambda self: torch.Size(self.conv.shape))
    dtype = property(lambda self: self.conv.dtype)
    device = property(lambda self: self.conv.device)

    def dim(self) -> int:
        """Rows and channels: 2."""
        return 2

    def __hash__(self) -> int:
        return id(self)

    @eagerly
    def __add__(self, other: Any) -> Any:
        """Of the class, this takes half of torch's detour."""
        if _tensor.__add__ is not _left_sum:
            return _tensor.__add__(self, other)
        result = _sum(self, other)
        return _left_sum(self, other) if result is None else result

    @eagerly
    def __radd__(self, other: Any) -> Any:
        if _tensor.__radd__ is not _right_sum:
            return _tensor.__radd__(self, other)
        result = _sum(self, other)
        return _right_sum(self, other) if result is None else result

    @classmethod
    @eagerly
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        follow = FOLLOWING.get(func)
        if follow is not None and not (torch.compiler.is_compiling() or torch_replaced()):
            result = follow(*args, **kwargs) if kwargs else follow(*args)
            if result is not None:
                return result
        if func in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return cls.on_plain(func, types, args, kwargs)

    @eagerly
    def materialize(self) -> torch.Tensor:
        conv = self.conv
        if not torch.compiler.is_compiling():
            return conv.materialize()
        result = conv.fallback if conv.result is None else conv.result
        return apart(conv.materialize) if result is None else result  # type: ignore[no-any-return]


class UnlaunchedFeatures(DeferredFeatures, torch.Tensor):
    """Features without memory: their convolution has not been launched."""

    __torch_dispatch__ = LazyTensor.on_plain  # type: ignore[assignment]


class ObservedFeatures(DeferredFeatures, torch.Tensor):
    """Features with memory, of a layer of which it is found out what follows."""


KINDS = (UnlaunchedFeatures, ObservedFeatures)
_tensor: Any = torch.Tensor
_plain_sum = _tensor.add  # whatever the program puts there later
_left_sum, _right_sum = _tensor.__add__, _tensor.__radd__
_functions = torch._C._len_torch_function_stack
_make, _no_memory = torch.Tensor._make_wrapper_subclass, torch._C._set_throw_on_mutable_data_ptr
_strided = torch.strided
_T = _tensor
# Of a tensor, without its values.
_ABOUT = {
    _T.__len__,
    _T.element_size,
    _T.get_device,
    _T.is_complex,
    _T.is_floating_point,
    _T.is_inference,
    _T.nelement,
    _T.numel,
    _T.size,
    _T.grad_fn.__get__,
    _T.is_cpu.__get__,
    _T.is_cuda.__get__,
    _T.is_leaf.__get__,
    _T.is_meta.__get__,
    _T.layout.__get__,
    _T.requires_grad.__get__,
}


@eagerly
def features_of(conv: MaybeDeferred) -> torch.Tensor:
    """The features [N_out, C_out] of a deferred convolution as a tensor in its dtype; of a result, itself. The tensor
    may have no memory until somebody looks at it. Twin in C: `features`, `features_alone`, `features_of`."""
    if type(conv) is not DeferredConv:
        return conv  # type: ignore[return-value]
    features: Any
    if (native := native_calls.features_of) is not None:
        features = native(conv)
        if features is not NotImplemented:
            return features  # type: ignore[no-any-return]
    call = conv.call
    if call.target and conv.result is None:
        # Names of arguments would take it a quarter longer.
        features = _make(UnlaunchedFeatures, call.shape, None, None, None, call.dtype, _strided, call.device)
        # Extensions that ask for the memory, of which there is none, get an exception.
        _no_memory(features)
    elif conv.follows:
        result = conv.result if conv.fallback is None else conv.fallback
        features = result.as_subclass(ObservedFeatures)  # type: ignore[union-attr]
    else:
        return conv.materialize()
    features.conv = conv
    return features  # type: ignore[no-any-return]


def _sum(x: Any, other: Any) -> torch.Tensor | None:
    if _functions() or torch.compiler.is_compiling():
        return None
    return FOLLOWING[_plain_sum](x, other)


@eagerly
def materialize(value: Any) -> Any:
    """`value` with plain tensors for lazy ones."""
    if isinstance(value, LazyTensor):
        return type(value).materialize(value)
    if isinstance(value, (list, tuple)):
        parts = [materialize(part) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value
