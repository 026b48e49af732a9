"""The dataflow of single layers, against the settings and the rules: `sparse_bridge.dataflow`."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ... import log, settings
from ...errors import SettingError, require_type

_local = threading.local()
_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_lock = threading.Lock()
_traced: list[str] = []  # of the program that is traced now: compilers follow no locks
inside = 0  # forward passes of such modules, and blocks of `at_once`, that run now in all threads


class _Enter:
    """A hook before a module's forward pass: its convolutions, and those inside it, take `name`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            _traced.append(self.name)
            return
        _stack().append(self.name)
        _count(1)


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        _traced.pop()
        return
    stack = _stack()
    if stack:
        stack.pop()
        _count(-1)


def _count(step: int) -> None:
    global inside
    with _lock:
        inside += step


def _stack() -> list[str]:
    stack: list[str] = _local.__dict__.setdefault("stack", [])
    return stack


def current() -> str:
    """The dataflow of the module that this thread is in, or ""."""
    stack = _stack()
    return stack[-1] if stack else ""


def traced() -> str:
    """`current` while a program is traced."""
    return _traced[-1] if _traced else ""


@contextlib.contextmanager
def entered(name: str) -> Iterator[None]:
    """As inside of a module that was given `name`; "" changes nothing."""
    if not name:
        yield
        return
    _stack().append(name)
    _count(1)
    try:
        yield
    finally:
        _stack().pop()
        _count(-1)


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """In this block no convolution of this thread is deferred."""
    previous = getattr(_local, "at_once", False)
    _local.at_once = True
    _count(1)
    try:
        yield
    finally:
        _count(-1)
        _local.at_once = previous


def launches_at_once() -> bool:
    """Whether this thread is in such a block."""
    return inside > 0 and getattr(_local, "at_once", False)


def of(module: nn.Module) -> str | None:
    """What `dataflow` gave the module itself."""
    hooks = module._forward_pre_hooks.values()
    return next((hook.name for hook in hooks if isinstance(hook, _Enter)), None)


def _split(name: str | None, splits: int) -> str:
    """The dataflow of that many mask splits."""
    names = ("unmasked", "masked", "masked:2", "masked:3", "masked:4")
    if name != "masked" or type(splits) is not int or not 0 <= splits < len(names):
        raise SettingError(f'dataflow {name!r} with splits={splits!r}; expected "masked" with 0 to 4 mask splits.')
    return names[splits]


def dataflow(module: nn.Module, name: str | None, splits: int | None = None) -> None:
    """Have the convolutions of a module computed by one dataflow, whatever settings and rules say.

    Args:
        module: a layer of any framework, or a container, for all layers inside that are not given
            one of their own. The choice is copied and pickled with it.
        name: "masked", "unmasked", "grouped", "per_offset" or "explicit"; None or "auto" takes the
            choice back.
        splits: of "masked", 1 to 4 mask splits: ranges of the kernel offsets, each with a row order
            and partial sums of its own, for less redundant work. 0 is "unmasked". "masked:2" says
            the same as splits=2.

    A dataflow that cannot serve a call raises there, as a forced one does. `report()` lists the
    modules.
    Raises: SettingError for another name or number, DataTypeError for what is no module.
    """
    require_type("dataflow()", module, nn.Module, "a torch.nn.Module")
    if splits is not None:
        name = _split(name, splits)
    if name not in (None, "auto", *settings.DATAFLOWS):
        raise SettingError(f"dataflow {name!r}; expected one of {', '.join(settings.CHOICES['dataflow'])} or None.")
    for hooks, ours in ((module._forward_pre_hooks, _Enter), (module._forward_hooks, None)):
        for key, hook in list(hooks.items()):
            if hook is _leave or (ours is not None and isinstance(hook, ours)):
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)
    _modules.discard(module)
    if name in (None, "auto"):
        return
    if all(type(one).__module__.startswith("torch.nn.") for one in module.modules()):
        log.warn(f"dataflow() got {type(module).__name__}, in which nothing is sparse; no layer takes it.", UserWarning)
    module.register_forward_pre_hook(_Enter(str(name)), prepend=True)
    module.register_forward_hook(_leave, always_call=True)
    _modules.add(module)


def listed() -> dict[str, dict[str, int]]:
    """Modules that were given a dataflow: how many of each class, by dataflow."""
    counts: dict[str, dict[str, int]] = {}
    for module in list(_modules):
        name = of(module)
        if name is not None:
            by_class = counts.setdefault(name, {})
            by_class[type(module).__name__] = by_class.get(type(module).__name__, 0) + 1
    return counts
