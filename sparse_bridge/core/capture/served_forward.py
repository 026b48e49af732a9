"""Calls of single modules that something else serves, where nobody can notice.

Nothing is put into the module, as shallow copies and replicas would take it along, and as programs wrap, compare,
read and pickle what they find there. The class has a descriptor for its `forward` instead. It is
the class's function for everybody, bound to whoever asks, but for torch's call of a module that is served.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from ... import state

_CALL = nn.Module._call_impl.__code__
_FORWARD = "forward"
_lock = threading.RLock()
_classes: weakref.WeakSet[type] = weakref.WeakSet()  # those that have a descriptor
_is_compiling = torch.compiler.is_compiling


class Server(Protocol):
    """What is called in place of a module's forward."""

    def serves(self, module: nn.Module) -> bool:
        """Whether these are calls of this module."""


class ServedForward:
    """Stands for `function` in the dictionary of a class. servers: by the identity of a module."""

    def __init__(self, function: types.FunctionType) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.servers: dict[int, Server] = {}

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Whoever looks into the dictionary of the class, as mocks do, meets a function. torch.compile must not: its
        guards read what only true functions have."""
        asks = str(sys._getframe(1).f_globals.get("__name__"))
        return ServedForward if asks.startswith("torch._dynamo") else types.FunctionType

    def __get__(self, module: Any, cls: type | None = None) -> Any:
        if module is None:
            return self.function
        if _is_compiling():  # first: torch.compile follows this, and cannot follow the rest
            return functools.partial(self.function, module)
        server = self.servers.get(id(module))
        if server is not None and sys._getframe(1).f_code is _CALL and server.serves(module):
            return server
        return types.MethodType(self.function, module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """For those who took it from the dictionary."""
        return self.function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "function":  # before there is one
            raise AttributeError(name)
        return getattr(self.function, name)


def function_of(member: Any) -> Any:
    """What the program put into a class, of what is in its dictionary."""
    return member.function if type(member) is ServedForward else member


def _owner(cls: type) -> type | None:
    """The class whose forward an object of `cls` has."""
    return next((base for base in cls.__mro__ if _FORWARD in vars(base)), None)


def possible(module: nn.Module) -> bool:
    """Whether calls of this module may be served by something else than its class's forward."""
    cls = type(module)
    owner = _owner(cls)
    if owner in (None, nn.Module) or cls.__getattribute__ is not object.__getattribute__:
        return False  # torch's call would not be the one that asks
    return isinstance(function_of(vars(owner)[_FORWARD]), types.FunctionType)


def serve(module: nn.Module, server: Server) -> Callable[[], None]:
    """Have `server` called in place of the module's forward, which must be `possible`; what ends that."""
    with _lock:
        owner = _owner(type(module))
        assert owner is not None
        held = vars(owner)[_FORWARD]
        if type(held) is not ServedForward:
            held = ServedForward(held)
            type.__setattr__(owner, _FORWARD, held)  # not what a metaclass makes of it
            _classes.add(owner)
        held.servers[id(module)] = server
    return functools.partial(_end, held.servers, id(module), weakref.ref(server))


def _end(servers: dict[int, Server], key: int, server: weakref.ref[Any]) -> None:
    if key in servers and servers[key] is server():
        del servers[key]


@state.owns
def restore() -> None:
    """Give all classes their own function back."""
    with _lock:
        while _classes:
            cls = _classes.pop()
            held = vars(cls).get(_FORWARD)
            if type(held) is ServedForward:
                held.servers.clear()
                type.__setattr__(cls, _FORWARD, held.function)
