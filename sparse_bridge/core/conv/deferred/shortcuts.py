"""Norms and activations behind layers that are launched with them.

Those modules get a method of their own as forward, which does for deferred features what torch's
would come to, in a third of the time, and else calls torch's.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: F401  (as below)
from torch import Tensor, nn  # noqa: F401  (what torch's scripts of a forward look up here)

from .... import hooks, state
from ....native import calls as native_calls
from ...device.torch_compat import eagerly
from ..epilogue import Norm
from .features import LazyTensor, UnlaunchedFeatures, features_of


class ProfiledFeatures(LazyTensor, torch.Tensor):
    """Features [N, C] of a layer in training, of any float dtype, of which it is found out which norm takes them.
    Everything is done with `plain`, which they are."""

    plain: torch.Tensor

    def materialize(self) -> torch.Tensor:
        return self.plain

    @classmethod
    @eagerly
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is hooks.BATCH_NORM and not torch.compiler.is_compiling():
            install_on_frame(_outside(sys._getframe(1)))
        return cls.on_plain(func, types, args, kwargs)


# What a norm in training makes of plain features by kernels, or None; set where those are.
in_training: Callable[[nn.Module, torch.Tensor], torch.Tensor | None] | None = None


def _normalise(self: Any, input: Any) -> Any:
    """`BatchNorm1d.forward`."""
    if type(input) is ProfiledFeatures:
        input = input.plain
    if torch.compiler.is_compiling() or hooks.torch_replaced():
        return _own_forward(self, input)
    if type(input) is torch.Tensor and in_training is not None:
        trained = in_training(_called(self), input)
        if trained is not None:
            return trained
    elif type(input) is UnlaunchedFeatures:
        if (native := native_calls.normalised) is not None:
            result = native(self, input)
            if result is not NotImplemented:
                return result
        conv = input.conv
        call = conv.call
        norm = None if call.fused is None else call.between[3]
        if norm is not None and _is_norm(self, norm):
            result = conv.as_launched(norm)
            if result is not None:
                return features_of(result)
    return _own_forward(self, input)


def _rectify(self: Any, input: Any) -> Any:
    """`ReLU.forward`."""
    if type(input) is UnlaunchedFeatures and not (torch.compiler.is_compiling() or hooks.torch_replaced()):
        result = input.conv.end_launched("relu", 0.0)
        if result is not None:
            if self.inplace:
                input.conv.replace_result(result)
            return result
    return _own_forward(self, input)


_SHORTCUTS: dict[types.CodeType, tuple[type[nn.Module], Callable[..., Any]]] = {
    hooks.NORM_FORWARD.__code__: (nn.BatchNorm1d, _normalise),
    hooks.RELU_FORWARD.__code__: (nn.ReLU, _rectify),
}
_BETWEEN = "sparse_bridge.core", "sparse_bridge.native", "torch.nn.functional", "torch._jit_internal", "torch.overrides"
_call = nn.Module._call_impl.__code__  # with hooks, newer torch calls in a function inside of it
_codes = [_call, nn.Module._slow_forward.__code__]
_codes += [constant for constant in _call.co_consts if isinstance(constant, types.CodeType)]
_CALLS = frozenset(map(id, _codes))  # code objects take seven times as long to hash
_fast_forwards: weakref.WeakSet[nn.Module] = weakref.WeakSet()
for _module, _shortcut in _SHORTCUTS.values():
    functools.update_wrapper(_shortcut, _module.forward)  # for those who read its source
    setattr(_shortcut, hooks.IN_PLACE_OF, _module.forward)


def _is_norm(module: Any, norm: Norm) -> bool:
    """Whether a BatchNorm1d in eval mode is the norm that a layer was launched with. Twin in C: `is_norm`."""
    if module.training or type(module).forward is not hooks.NORM_FORWARD:
        return False
    buffers, parameters = module._buffers, module._parameters
    return (
        buffers.get("running_mean") is norm[0]
        and buffers.get("running_var") is norm[1]
        and parameters.get("weight") is norm[2]
        and parameters.get("bias") is norm[3]
        and module.eps == norm[4]
    )


def _outside(frame: types.FrameType | None) -> types.FrameType | None:
    """The first frame that is neither of this package nor one of torch's functions on tensors."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame = frame.f_back
    return frame


def _called(module: Any) -> Any:
    """Who is meant: a shallow copy of a module calls the method of that."""
    caller = _outside(sys._getframe(1))
    if caller is not None and id(caller.f_code) in _CALLS:
        called = caller.f_locals.get("self")
        return called if type(called) is type(module) else module
    return module


def _own_forward(module: Any, input: Any) -> Any:
    """What the class computes."""
    if not torch.compiler.is_compiling():  # which follow no frames
        module = _called(module)
    return type(module).forward(module, input)


def install_fast_forward(input: Any) -> None:
    """Give the module that is called with deferred features, if it is one, the short way."""
    call = input.conv.call
    if call.fused is None or call.fused.lookups >= 2 * len(call.target):
        return
    call.fused.lookups += 1
    install_on_frame(_outside(sys._getframe(1)))


def install_on_frame(caller: types.FrameType | None) -> None:
    """The same of the module whose forward this frame is."""
    cls, shortcut = (nn.Module, None) if caller is None else _SHORTCUTS.get(caller.f_code, (nn.Module, None))
    if caller is None or shortcut is None:
        return
    module = caller.f_locals.get("self")
    if isinstance(module, cls) and type(module) is cls and _has_own_forward(module):
        module.__dict__["forward"] = types.MethodType(shortcut, module)
        _fast_forwards.add(module)


def _has_own_forward(module: nn.Module) -> bool:
    """Whether nothing, or no more than the method of its class, stands for its forward: that is what is loaded of a
    module that was pickled with the short way, and shallow copies would take it along."""
    if "forward" not in module.__dict__:
        return True
    own = module.__dict__["forward"]
    return type(own) is types.MethodType and own.__self__ is module and own.__func__ is type(module).forward


@state.owns
def reset() -> None:
    """Give all modules torch's forward back."""
    for module in list(_fast_forwards):
        forward = module.__dict__.get("forward")
        if hasattr(getattr(forward, "__func__", None), hooks.IN_PLACE_OF):
            del module.__dict__["forward"]
    _fast_forwards.clear()
