"""Features of convolutions that wait, as tensors: for code that takes features out of a sparse
tensor, normalises, adds or activates them, and puts them back.

Those operations go to the pending convolution. Everything else that is done with the tensor sees
what the convolution computes.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn  # noqa: F401  (what torch's scripts of a forward look up here)

from ... import hooks, state
from .epilogue import Norm
from .pending import Following, PendingConv


class Features:
    """What both kinds of tensor share."""

    pending: PendingConv
    ndim = 2  # asked for all the time; as attributes they take no detour
    shape = property(lambda self: torch.Size(self.pending.shape))
    dtype = property(lambda self: self.pending.dtype)
    device = property(lambda self: self.pending.device)

    def dim(self) -> int:
        return 2

    def __hash__(self) -> int:
        return id(self)

    def __add__(self, other: Any) -> Any:
        """Of the class, this takes half of torch's detour."""
        made = None if _functions() else _add(self, other)
        return _left_sum(self, other) if made is None else made

    def __radd__(self, other: Any) -> Any:
        made = None if _functions() else _add(self, other)
        return _right_sum(self, other) if made is None else made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        follow = _FOLLOWING.get(func)
        if follow is not None and not torch.compiler.is_compiling():
            found = follow(*args, **kwargs) if kwargs else follow(*args)
            if found is not None:
                return found
        kwargs = kwargs or {}
        if func in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return func(*settled(args), **{name: settled(value) for name, value in kwargs.items()})


class Waiting(Features, torch.Tensor):
    """Features without memory: their convolution has not been launched."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = {name: settled(value) for name, value in (kwargs or {}).items()}
        return func(*settled(args), **named)


class Watched(Features, torch.Tensor):
    """Features with memory, of a layer of which it is found out what follows."""


class Noticed(torch.Tensor):
    """Features of a layer in training, of which it is found out which norm takes them. Everything
    is done with `plain`, which they are."""

    plain: torch.Tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _batch_norm_of_torch and not torch.compiler.is_compiling():
            _shorten_one(sys._getframe(3))  # behind torch's function and its detour
        named = {name: settled(value) for name, value in (kwargs or {}).items()}
        if len(types) > 1:  # other classes have a say
            return func(*settled(args), **named)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*settled(args), **named)


_KINDS = (Waiting, Watched)
_left_sum: Any = torch.Tensor.__add__
_right_sum: Any = torch.Tensor.__radd__
_functions = torch._C._len_torch_function_stack
_make, _no_memory = torch.Tensor._make_wrapper_subclass, torch._C._set_throw_on_mutable_data_ptr
_strided = torch.strided


def features_of(pending: Following) -> torch.Tensor:
    """The features of a pending convolution as a tensor; of a result, itself."""
    if type(pending) is not PendingConv:
        return pending  # type: ignore[return-value]
    made: Any
    call = pending.call
    if call.target and pending.result is None:
        # Names of arguments would take it a quarter longer.
        made = _make(Waiting, call.shape, None, None, None, call.dtype, _strided, call.device)
        # Extensions that ask for the memory, of which there is none, get an exception.
        _no_memory(made)
    elif pending.follows:
        there = pending.result if pending.fallback is None else pending.fallback
        made = there.as_subclass(Watched)  # type: ignore[union-attr]
    else:
        return pending.read()
    made.pending = pending
    return made  # type: ignore[no-any-return]


def settled(value: Any) -> Any:
    """`value` with plain tensors for features that wait."""
    kind = type(value)
    if kind in _KINDS:
        return value.pending.read()
    if kind is Noticed:
        return value.plain
    if isinstance(value, (list, tuple)):
        made = [settled(one) for one in value]
        return made if isinstance(value, list) else tuple(made)
    return value


def _then(
    x: Any, inplace: bool, follow: Callable[[PendingConv], Following]
) -> torch.Tensor:  # fmt: skip
    """Features behind one step more; in place, all who hold `x` see them."""
    made = follow(x.pending)
    if not inplace:
        return features_of(made)
    if type(made) is PendingConv:
        x.pending = made
        return x  # type: ignore[no-any-return]
    x.pending.become(made)
    return made  # type: ignore[return-value]


def _batch_norm(
    input: Any, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> torch.Tensor | None:  # fmt: skip
    if training or type(input) not in _KINDS or running_mean is None or running_var is None:
        return None
    _shorten(input)
    return features_of(input.pending.normed(
        Norm(running_mean, running_var, weight, bias, eps),
        lambda y: F.batch_norm(y, running_mean, running_var, weight, bias, False, momentum, eps),
    ))  # fmt: skip


def _relu(input: Any, inplace: bool = False) -> torch.Tensor:
    _shorten(input)
    if not inplace:
        return features_of(input.pending.activated("relu", 0.0, torch.relu))
    return _then(input, True, lambda conv: conv.activated("relu", 0.0, torch.relu_))


def _relu_(input: Any) -> torch.Tensor:
    return _relu(input, True)


def _leaky_relu(
    input: Any, negative_slope: float = 0.01, inplace: bool = False
) -> torch.Tensor:  # fmt: skip
    return _then(input, inplace, lambda conv: conv.activated(
        "leaky_relu", float(negative_slope), lambda y: F.leaky_relu(y, negative_slope, inplace)
    ))  # fmt: skip


def _sigmoid(input: Any) -> torch.Tensor:
    return _then(input, False, lambda conv: conv.activated("sigmoid", 0.0, torch.sigmoid))


def _add(input: Any, other: Any, **unusual: Any) -> torch.Tensor | None:
    if unusual:
        return None
    if type(input) not in _KINDS:
        input, other = other, input
    if other is input or not isinstance(other, torch.Tensor):
        return None
    rows = settled(other) if type(other) in _KINDS else other
    return features_of(input.pending.plus(rows, lambda y: y + rows))


def _add_(input: Any, other: Any, **unusual: Any) -> torch.Tensor | None:
    if unusual or type(input) not in _KINDS or other is input:
        return None
    if not isinstance(other, torch.Tensor):
        return None
    rows = settled(other)
    return _then(input, True, lambda conv: conv.plus(rows, lambda y: y.add_(rows)))


_FOLLOWING: dict[Any, Callable[..., torch.Tensor | None]] = {
    F.batch_norm: _batch_norm,
    F.relu: _relu, torch.relu: _relu, torch.Tensor.relu: _relu,
    torch.relu_: _relu_, torch.Tensor.relu_: _relu_,
    F.leaky_relu: _leaky_relu,
    torch.sigmoid: _sigmoid, torch.Tensor.sigmoid: _sigmoid,
    torch.add: _add, torch.Tensor.add: _add, torch.Tensor.__add__: _add,
    torch.Tensor.__radd__: _add,
    torch.Tensor.add_: _add_, torch.Tensor.__iadd__: _add_,
}  # fmt: skip
_T: Any = torch.Tensor
# Of a tensor, without its values.
_ABOUT = {
    _T.__len__, _T.element_size, _T.get_device, _T.is_complex, _T.is_floating_point,
    _T.is_inference, _T.nelement, _T.numel, _T.size, _T.grad_fn.__get__, _T.is_cpu.__get__,
    _T.is_cuda.__get__, _T.is_leaf.__get__, _T.is_meta.__get__, _T.layout.__get__,
    _T.requires_grad.__get__,
}  # fmt: skip


# Norms and activations behind layers that are launched with them. Those modules get a method of
# their own as forward, which does for features that wait what torch's would come to, in a third of
# the time, and else calls torch's.


# What a norm in training makes of plain features by kernels, or None; set where those are.
in_training: Callable[[nn.Module, torch.Tensor], torch.Tensor | None] | None = None


def _normalise(self: Any, input: Any) -> Any:
    """`BatchNorm1d.forward`."""
    if type(input) is Noticed:
        input = input.plain
    if torch.compiler.is_compiling() or F.batch_norm is not _batch_norm_of_torch:
        return _own_forward(self, input)
    if type(input) is torch.Tensor and in_training is not None:
        trained = in_training(_called(self, 2), input)
        if trained is not None:
            return trained
    elif type(input) is Waiting:
        conv = input.pending
        call = conv.call
        norm = None if call.fused is None else call.between[3]
        if norm is not None and _is_norm(self, norm):
            made = conv.as_launched(norm)
            if made is not None:
                return features_of(made)
    return _own_forward(self, input)


def _rectify(self: Any, input: Any) -> Any:
    """`ReLU.forward`."""
    own = F.relu is _relu_of_torch and nn.ReLU.forward is _relu_forward
    if type(input) is Waiting and own and not torch.compiler.is_compiling():
        made = input.pending.end_launched("relu", 0.0)
        if made is not None:
            if self.inplace:
                input.pending.become(made)
            return made
    return _own_forward(self, input)


_batch_norm_of_torch, _relu_of_torch = F.batch_norm, F.relu
_norm_forward, _relu_forward = nn.BatchNorm1d.forward, nn.ReLU.forward
_SHORTCUTS: dict[types.CodeType, tuple[type[nn.Module], Callable[..., Any]]] = {
    _norm_forward.__code__: (nn.BatchNorm1d, _normalise),
    _relu_forward.__code__: (nn.ReLU, _rectify),
}
_call = nn.Module._call_impl.__code__  # with hooks, newer torch calls in a function inside of it
_codes = [_call, nn.Module._slow_forward.__code__]
_codes += [one for one in _call.co_consts if isinstance(one, types.CodeType)]
_CALLS = frozenset(map(id, _codes))  # code objects take seven times as long to hash
_shortened: weakref.WeakSet[nn.Module] = weakref.WeakSet()
for _kind, _shortcut in _SHORTCUTS.values():
    functools.update_wrapper(_shortcut, _kind.forward)  # for those who read its source
    setattr(_shortcut, hooks.SHORTCUT_OF, _kind.forward)


def _is_norm(module: Any, norm: Norm) -> bool:
    """Whether a BatchNorm1d in eval mode is the norm that a layer was launched with."""
    if module.training or type(module).forward is not _norm_forward:
        return False
    buffers, parameters = module._buffers, module._parameters
    return (
        buffers.get("running_mean") is norm[0]
        and buffers.get("running_var") is norm[1]
        and parameters.get("weight") is norm[2]
        and parameters.get("bias") is norm[3]
        and module.eps == norm[4]
    )


def _called(module: Any, depth: int) -> Any:
    """Who is meant: a shallow copy of a module calls the method of that.  depth: frames up to the
    call."""
    caller = sys._getframe(depth)
    if id(caller.f_code) in _CALLS:
        called = caller.f_locals.get("self")
        return called if type(called) is type(module) else module
    return module


def _own_forward(module: Any, input: Any) -> Any:
    """What the class computes."""
    if not torch.compiler.is_compiling():  # which follow no frames
        module = _called(module, 3)
    return type(module).forward(module, input)


def _shorten(input: Any) -> None:
    """Give the module that is called with features that wait, if it is one, the short way."""
    call = input.pending.call
    if call.fused is None or call.fused.shown >= 2 * len(call.target):
        return
    call.fused.shown += 1
    _shorten_one(sys._getframe(5))  # of torch's function, its detour and the one that is told of it


def _shorten_one(caller: types.FrameType) -> None:
    """The same of the module whose forward this frame is."""
    kind, shortcut = _SHORTCUTS.get(caller.f_code, (nn.Module, None))
    if shortcut is None:
        return
    module = caller.f_locals.get("self")
    if isinstance(module, kind) and type(module) is kind and "forward" not in module.__dict__:
        module.__dict__["forward"] = types.MethodType(shortcut, module)
        _shortened.add(module)


@state.owns
def reset() -> None:
    """Give all modules torch's forward back."""
    for module in list(_shortened):
        forward = module.__dict__.get("forward")
        if hasattr(getattr(forward, "__func__", None), hooks.SHORTCUT_OF):
            del module.__dict__["forward"]
    _shortened.clear()
