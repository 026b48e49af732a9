"""Calls of single modules that something else serves, where nobody can notice.

Nothing is put into the module, as shallow copies and replicas would take it along, and as programs wrap, compare,
read and pickle what they find there. The class has a descriptor for its `forward` instead. It is
the class's function for everybody, bound to whoever asks, but for torch's call of a module that is served.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import functools
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedError
from ..hooks import ModelReference

_CALL = nn.Module._call_impl.__code__
# With hooks, newer torch calls in a function inside of it.
_CALLS = _CALL, *[constant for constant in _CALL.co_consts if isinstance(constant, types.CodeType)]
_FORWARD = "forward"
_lock = threading.RLock()
_classes: weakref.WeakSet[type] = weakref.WeakSet()  # those that have a descriptor
_is_compiling = torch.compiler.is_compiling


class Server(ModelReference, abc.ABC):
    """Is called in place of the forward of a model, until it is uninstalled or the model is gone.  asked: the program
    wants that.  over: it is uninstalled."""

    asked = over = False

    def __init__(self, model: nn.Module) -> None:
        """Raises UnsupportedError where that is not `possible`."""
        super().__init__(model)
        self.before = serve(self)  # what was called so far

    def uninstall(self) -> None:
        """Have the model's own forward called again."""
        self.over = True
        end(self)

    def gone(self) -> None:
        """Nothing is served any more."""
        self.uninstall()

    @abc.abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class ServedForward:
    """Stands for `function` in the dictionary of a class. servers: by the identity of a module."""

    def __init__(self, function: types.FunctionType) -> None:
        self.function = function
        self.servers: dict[int, Server] = {}
        functools.update_wrapper(self, function)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Whoever looks into the dictionary of the class, as mocks do, meets a function. torch.compile must not: its
        guards read what only true functions have."""
        asks = str(sys._getframe(1).f_globals.get("__name__"))
        return ServedForward if asks.startswith("torch._dynamo") else types.FunctionType

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        """The function's: pickles of whole classes read it."""
        return self.function.__dict__

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are the function, also where this package is not installed."""
        return copy.copy, (self.function,)

    def __get__(self, module: Any, cls: type | None = None) -> Any:
        if module is None:
            return self.function
        if _is_compiling():  # first: torch.compile follows this, and cannot follow the rest
            return functools.partial(self.function, module)
        server = self.servers.get(id(module))
        if server is not None and sys._getframe(1).f_code in _CALLS and server.refers_to(module):
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


def serve(server: Server) -> Server | None:
    """Have `server` called in place of the forward of its model; what was called so before. Raises UnsupportedError
    where that is not `possible`."""
    owner = _owner(type(server.model))
    if owner is None or not possible(server.model):
        raise UnsupportedError(
            f"calls of {type(server.model).__name__} cannot be replayed or tuned: its forward is no plain function of "
            "its class, or the class has a __getattribute__ of its own. Give optimize() a module inside of it."
        )
    with _lock:
        held = vars(owner)[_FORWARD]
        if type(held) is not ServedForward:
            held = ServedForward(held)
            type.__setattr__(owner, _FORWARD, held)  # not what a metaclass makes of it
            _classes.add(owner)
        before = held.servers.get(id(server.model))
        held.servers[id(server.model)] = server
        return before


def end(server: Server) -> None:
    """Undo `serve`, whether or not the model is still there."""
    with _lock:
        for servers in _servers():
            for key, held in list(servers.items()):  # models that are dropped meanwhile end theirs
                if held is server:
                    servers.pop(key, None)


def asked(module: nn.Module) -> bool:
    """Whether the program has asked for something that is called in place of this module's forward."""
    held = vars(_owner(type(module)) or nn.Module)[_FORWARD]
    server = held.servers.get(id(module)) if type(held) is ServedForward else None
    return server is not None and server.asked and server.refers_to(module)


def _servers() -> list[dict[int, Server]]:
    """Of every class."""
    held = [vars(cls).get(_FORWARD) for cls in _classes]
    return [one.servers for one in held if type(one) is ServedForward]


@contextlib.contextmanager
def uninstalled() -> Iterator[None]:
    """In this block all classes have their own function. Behind it only what the program has asked for serves."""
    with _lock:
        asked = [one for servers in _servers() for one in list(servers.values()) if one.asked]
        models = {one: model for one in asked if (model := one._model()) is not None}  # which stay meanwhile
        while _classes:
            cls = _classes.pop()
            held = vars(cls).get(_FORWARD)
            if type(held) is ServedForward:
                held.servers.clear()
                type.__setattr__(cls, _FORWARD, held.function)
        try:
            yield
        finally:
            for server, model in models.items():
                if possible(model):
                    serve(server)
