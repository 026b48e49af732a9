"""What layers of torch and of frameworks run, which a program might replace."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..served_forward import function_of

_CALLING = ("__call__", "_wrapped_call_impl", "_call_impl", "__getattr__")  # of nn.Module, all that a call goes through


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
            if callable(vars(torch).get(inner)):
                key(vars(torch), inner, f"torch.{inner}")
