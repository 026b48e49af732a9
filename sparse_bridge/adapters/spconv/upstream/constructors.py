"""Constructors of layers with many arguments: names, positions and defaults are written once, in that of
the base."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

REQUIRED = inspect.Parameter.empty
Constructor = Callable[..., None]


def _signature_of(base: Constructor, names: str = "", **defaults: Any) -> inspect.Signature:
    """The signature of the arguments `names` of the constructor `base`, in this order; without
    names, of all that it has.

    defaults: those that differ from its own, and further arguments, which come last.
    """
    theirs = inspect.signature(base).parameters
    chosen = ("self", *names.split()) if names else theirs
    values = {name: theirs[name].default for name in chosen} | defaults
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature([inspect.Parameter(name, positional, default=value) for name, value in values.items()])


def takes(
    base: Constructor, names: str = "", *, ignored: str = "", **defaults: Any
) -> Callable[[Constructor], Constructor]:
    """Give a constructor of keywords the signature that `_signature_of` makes of the others.

    It gets by name what the caller passed, by position or not.  ignored: a further keyword, which
    is dropped and which inspection does not show.
    """
    signature = _signature_of(base, names, **defaults)

    def decorated(init: Constructor) -> Constructor:
        @functools.wraps(init)
        def constructor(self: Any, *args: Any, **keywords: Any) -> None:
            keywords.pop(ignored, None)
            try:
                passed = signature.bind(self, *args, **keywords).arguments
            except TypeError as wrong:
                raise TypeError(f"{type(self).__name__}.__init__(): {wrong}") from None
            init(**passed)

        constructor.__signature__ = signature  # type: ignore[attr-defined]
        return constructor

    return decorated
