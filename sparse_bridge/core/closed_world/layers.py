"""What layers of torch and of frameworks run, which a program might replace."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..served_forward import function_of

_CALLING = ("__call__", "_wrapped_call_impl", "_call_impl", "__getattr__")  # of nn.Module, all that a call goes through

_SPACES = (vars(torch), "torch"), (vars(torch._C._nn), "torch._C._nn")
_METHODS = vars(torch.Tensor)  # of Python; a method that a program puts there hides the one of C
# What operators call unseen; where a model is watched, functions stand before these.
CONVERSIONS = ("__bool__", "__int__", "__float__", "__index__", "__complex__")
_COMPUTING = frozenset(vars(torch._C.TensorBase)) - vars(torch.Tensor).keys() - frozenset(CONVERSIONS)


def guard_tensors(absent: Callable[[Any, Iterable[str], str], Any]) -> None:
    """Guard that nothing stands before the methods of tensors, operators among them.  absent: see `State`."""
    absent(_METHODS, _COMPUTING, "torch.Tensor")


def guard_parameters(state: Any, model: nn.Module, attributes: set[str]) -> None:
    """Guard what the program asks of parameters that no `__dict__` has: whether they are trained or have a gradient,
    and how often they were written to.  state: a `State`."""
    parameters = list(model.parameters())
    for name in attributes & _OF_PARAMETERS.keys():
        state.entry(_OF_PARAMETERS[name], parameters, lambda _, name=name: f"{name} of a parameter")


_OF_PARAMETERS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "requires_grad": lambda box: tuple([one.requires_grad for one in box]),
    "grad": lambda box: tuple([one.grad is None for one in box]),
    "_version": lambda box: tuple([None if one.is_inference() else one._version for one in box]),
}


def guard_methods(cls: type, key: Callable[[Any, str, str], Any]) -> None:
    """Guard the methods of a class of layers, and the functions of torch that they call.  key: see `State`."""
    own, base = vars(cls), cls is nn.Module
    for name, member in list(own.items()):
        function = function_of(member)
        if isinstance(function, FunctionType) and (name in _CALLING or not base):
            key(own, name, f"{cls.__name__}.{name}")
            if not base:
                _guard_functions(function.__code__, key)


def _guard_functions(code: CodeType, key: Callable[[Any, str, str], Any]) -> None:
    """Guard what code calls of `torch.nn.functional`, and what that calls of torch."""
    for name in code.co_names:
        function = vars(F).get(name)
        if not callable(function):
            continue
        key(vars(F), name, f"torch.nn.functional.{name}")
        for inner in function.__code__.co_names if isinstance(function, FunctionType) else ():
            for space, label in _SPACES:
                if callable(space.get(inner)):
                    key(space, inner, f"{label}.{inner}")
