"""The arguments of MinkowskiEngine 0.4, for callables that have those of 0.5.

`@arguments_of_0_4("in_channels out_channels ... has_bias=bias kernel_generator dimension")` lists
what 0.4 took, in its order. `old=new` is a name that 0.5 changed. A parameter of 0.4 alone is
keyword-only in the callable; one that the callable lacks means nothing any more and is dropped.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from ....errors import DataTypeError
from .. import profile
from .enums import GlobalPoolingMode, MemoryManagerBackend

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments

_Parameter = inspect.Parameter
_OLD_TYPES = (GlobalPoolingMode, MemoryManagerBackend)  # 0.5 takes them nowhere


def _never(*arguments: Any) -> bool:
    return False


def arguments_of_0_4(
    order: str, *, also: str = "", recognised: Callable[..., bool] = _never
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a callable take 0.4's arguments: its names in any profile, its order in that of 0.4.

    order: names of 0.4 in its order; see above.  also: further names, by keyword alone.
    recognised: of the positional arguments, whether they can be those of 0.4 alone. Then its order
        holds in any profile, and a profile that nobody chose is 0.4 from then on.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())
        bound = int(bool(parameters) and parameters[0].name == "self")
        plain = [p.name for p in parameters if p.kind is _Parameter.POSITIONAL_OR_KEYWORD]
        plain, own = plain[bound:], frozenset(plain[bound:])
        names = tuple(text.partition("=")[0] for text in order.split())
        old = _renamed([*order.split(), *also.split()], own, frozenset(signature.parameters))
        shared = bound + _common(plain, order.split())
        function_name = function.__qualname__.removesuffix(".__init__")

        # For torch.compile, these close over plain values alone.
        def translated(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
            positional = args[bound:]
            _check_names(function_name, kwargs, own, old)
            if len(args) <= shared:
                return args, _by_new_names(function_name, list(kwargs.items()), old)
            is_old = _is_old_by_type(positional, names, shared - bound, kwargs) or recognised(*positional)
            if is_old:
                profile.saw_old(f"{function_name}({', '.join(names)})")
            if not (is_old or profile.is_old()):
                return args, _by_new_names(function_name, list(kwargs.items()), old)
            if len(positional) > len(names):
                raise DataTypeError(
                    f"{function_name} takes {len(names)} positional arguments in 0.4 ({', '.join(names)}), "
                    f"got {len(positional)}."
                )
            placed = list(zip(names[shared - bound :], args[shared:], strict=False))
            return args[:shared], _by_new_names(function_name, placed + list(kwargs.items()), old)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            differs = len(args) > shared
            for name in kwargs:
                differs = differs or name not in own
            if differs:
                args, kwargs = translated(args, kwargs)
            return function(*args, **kwargs)

        def in_force() -> inspect.Signature:
            """The signature that the profile reads positional arguments by, without `self`."""
            if not profile.is_old():
                return inspect.Signature(parameters[bound:])
            sources = [signature.parameters.get(old.get(name, name) or "") for name in names]
            defaults = [None if source is None else source.default for source in sources]
            return inspect.Signature(
                [
                    _Parameter(name, _Parameter.POSITIONAL_OR_KEYWORD, default=default)
                    for name, default in zip(names, defaults, strict=True)
                ]
            )

        call.signature_in_force = in_force  # type: ignore[attr-defined]
        call.dropped = {name for name, new in old.items() if new is None}  # type: ignore[attr-defined]
        return call

    return decorate


def _renamed(texts: list[str], own: frozenset[str], parameters: frozenset[str]) -> dict[str, str | None]:
    """Name of 0.4 -> that of 0.5, None for one that means nothing; those that differ."""
    new_names: dict[str, str | None] = {}
    for text in texts:
        name, _, new = text.partition("=")
        if name not in own:
            new_names[name] = new or (name if name in parameters else None)
    return new_names


def _common(mine: list[str], theirs: list[str]) -> int:
    """How many parameters, from the first one, both orders share."""
    count = 0
    for name, text in zip(mine, theirs, strict=False):
        if text.rpartition("=")[2] != name:
            break
        count += 1
    return count


def _check_names(function_name: str, kwargs: dict[str, Any], own: frozenset[str], old: dict[str, str | None]) -> None:
    """Raises: DataTypeError for a keyword of neither release."""
    used = [name for name in kwargs if name not in own]
    for name in used:
        if name not in old:
            raise DataTypeError(f"{function_name} got an unexpected keyword argument {name!r}.")
    if used:
        profile.saw_old(f"{function_name}({', '.join(used)}=...)")


def _is_old_by_type(positional: tuple[Any, ...], names: tuple[str, ...], shared: int, kwargs: dict[str, Any]) -> bool:
    """Whether an argument stands where only 0.4 takes one like it."""
    for value in positional[shared:]:
        if isinstance(value, _OLD_TYPES):
            return True
    if len(positional) > len(names) or names[len(positional) - 1] != "dimension":
        return False
    return type(positional[-1]) is int and "dimension" not in kwargs


def _by_new_names(function_name: str, named: list[tuple[str, Any]], old: dict[str, str | None]) -> dict[str, Any]:
    """Raises: DataTypeError for one that is given twice."""
    arguments: dict[str, Any] = {}
    for name, value in named:
        new = old.get(name, name)
        if new in arguments:
            raise DataTypeError(f"{function_name} got {new!r} more than once (as {name!r}).")
        if new is not None:
            arguments[new] = value
    return arguments
