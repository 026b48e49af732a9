"""Methods by way of which an original function computes what a patched one computes at once.

Programs override such steps in a subclass, on an object, or on the framework's own class. A patched
function that does not call a step must leave those calls to the original.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

__all__ = ["Steps", "names_in", "package_of"]


class Steps:
    """The steps of a method of `owner` as they are now: what it calls on its object, directly or by
    way of other steps, as its compiled code tells.

    original: the method, where `owner` has a patched one by now.  but: steps that the caller asks
    about itself.  also: further attributes of `owner`.
    """

    def __init__(
        self,
        owner: type,
        method: str,
        original: Callable[..., Any] | None = None,
        but: tuple[str, ...] = (),
        also: tuple[str, ...] = (),
    ) -> None:
        first = getattr(owner, method) if original is None else original
        names = dict.fromkeys((*_called(owner, first, {method}), *also))
        self._made = tuple((name, getattr(owner, name)) for name in names if name not in but)
        # What was put on the class before this was made is nobody's subclass, and no step of the framework.
        known = ("", "sparse_bridge", package_of(owner))
        replaced = (name for name, step in ((method, first), *self._made) if package_of(step) not in known)
        self._replaced = next(replaced, None)

    def overridden(self, layer: nn.Module) -> str | None:
        """A step that the layer has from elsewhere: from its class, from itself, or from whoever
        changed the framework's class. None where there is none. About a forward of the object's own
        asks `hooks.plain`. (This is asked at every call.)"""
        layer_class, own = type(layer), layer.__dict__
        for name, made in self._made:
            if getattr(layer_class, name) is not made or (name in own and name != "forward"):
                return name
        return self._replaced

    def refusal(self, layer: nn.Module) -> str | None:
        """Why a call must run in the framework itself."""
        name = self.overridden(layer)
        return None if name is None else f"{name} is overridden"


def package_of(of: Any) -> str:
    """The top-level package of a class or function; "" for values."""
    module = getattr(_function(of), "__module__", None)
    return module.partition(".")[0] if isinstance(module, str) else ""


def _function(attribute: Any) -> Any:
    """What runs when an attribute of a class is used."""
    attribute = getattr(attribute, "fget", None) or getattr(attribute, "__func__", attribute)
    return inspect.unwrap(attribute) if callable(attribute) else attribute


def _called(owner: type, function: Any, known: set[str]) -> Iterator[str]:
    """Names of the attributes of a class that a function of it asks for. Those of `nn.Module` are
    left out.  known: those that need not be said again."""
    for name in names_in(function):
        definer = next((base for base in owner.__mro__ if name in vars(base)), object)
        if name not in known and definer not in (object, nn.Module):
            known.add(name)
            yield name
            yield from _called(owner, vars(definer)[name], known)


def names_in(function: Any) -> Iterator[str]:
    """Global names and attributes that a function uses, or the functions inside of it."""
    codes = [getattr(_function(function), "__code__", None)]
    while codes:
        code = codes.pop()
        if isinstance(code, types.CodeType):
            yield from code.co_names
            codes += code.co_consts
