"""`torch.compile` without `fullgraph=True`: the outermost sparse module is one eager call.

Tracing sparse layers costs seconds a layer and gains nothing where graphs break: what a layer launches is
no part of a graph. So the compiler is told two things while a framework is enabled. Frames of sparse modules
and of our own functions run as they are, with all that they call; and a call of such a function ends the
graph. Programs that must be one graph (`fullgraph=True`, `torch.export`) are traced as they were.

Which torch: releases whose compiler can skip one frame and not the code of it, 2.8 and newer; sparse layers of
older ones run between graphs anyway (`core.traced`). The patches end when torch lets libraries say this.
"""

from __future__ import annotations

import dataclasses
import pathlib
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

from ...core.device.late_import import when_imported
from ...state import owns
from ..base import Patch
from ..patching import PatchSet

_ROOT = pathlib.Path(__file__).parents[2]
_EAGER = tuple(f"{_ROOT / part}" for part in ("adapters/", "core/capture/", "core/prefetch/", "core/conv/override.py"))
_TRACED = f"{_ROOT / 'adapters/torchsparse/sequence.py'}"  # stands in every nn.Sequential
_CALLS = ("CALL", "BINARY", "INPLACE", "STORE")  # instructions at which graphs can break
_WHY = "sparse layers run between graphs; compile with fullgraph=True to trace them (docs/compile.md)"
_REASON = "sparse modules run as they are where graphs may break"

_callers: weakref.WeakSet[type] = weakref.WeakSet()  # modules' classes that were seen to call functions of ours
_eager: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_users = 0
_undo: list[Callable[[], None]] = []


@owns
def reset() -> None:
    """Forget which modules are sparse."""
    _callers.clear()
    _eager.clear()


def install() -> None:
    """Tell the compiler, now or when it is imported. Each call needs a `remove`."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _undo.append(when_imported("torch._dynamo.convert_frame", _patch))


def remove() -> None:
    """Undo an `install`; the last one puts the compiler back."""
    global _users
    with _lock:
        _users -= 1
        while not _users and _undo:
            _undo.pop()()


def _patch(convert_frame: Any) -> None:
    from torch._dynamo.symbolic_convert import InliningInstructionTranslator

    wanted = (
        (convert_frame, "CatchErrorsWrapper"),
        (convert_frame, "ConvertFrame"),
        (convert_frame, "ConvertFrameReturn"),
    )
    if not all(hasattr(*one) for one in (*wanted, (InliningInstructionTranslator, "inline_call"))):
        return
    if "apply_to_code" not in {field.name for field in dataclasses.fields(convert_frame.ConvertFrameReturn)}:
        return
    patches = PatchSet(
        [
            Patch(convert_frame.CatchErrorsWrapper, "__call__", _converting, _REASON, "torch >= 2.8", wraps=True),
            Patch(InliningInstructionTranslator, "inline_call", _inlining, _REASON, "torch >= 2.8", wraps=True),
        ]
    )
    patches.apply()
    _undo.append(patches.undo)


def _converting(convert: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo.convert_frame import ConvertFrame  # what makes graphs that may break
    from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy

    def call(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        backend = getattr(self, "_torchdynamo_orig_backend", None) or self._torchdynamo_orig_callable  # torch 2.8
        if not isinstance(backend, ConvertFrame):
            return convert(self, frame, *args, **kwargs)
        if not _runs_eagerly(frame):
            result = convert(self, frame, *args, **kwargs)
            if not _runs_eagerly(frame):  # tracing has not shown that its module is sparse
                return result
        # Of this frame alone: its code may be another module's, or be traced with fullgraph=True.
        return ConvertFrameReturn(FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP), apply_to_code=False)

    return call


def _inlining(inline: Callable[..., Any]) -> Callable[..., Any]:
    def inline_call(translator: Any, caller: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        if not _ends_graph(caller, function):
            return inline(translator, caller, function, *args, **kwargs)
        from torch._dynamo.exc import SkipFrame
        from torch._dynamo.variables.functions import UserFunctionVariable

        root = caller.output.root_tx
        _learn(caller, root, function)
        if _runs_eagerly(root):
            raise SkipFrame(_WHY)
        return inline(translator, caller, UserFunctionVariable(_in_place), *args, **kwargs)

    return inline_call


def _disabled() -> None:
    """In the place of our functions: the compiler ends the graph and says why."""


_in_place: Any = _disabled
_in_place._torchdynamo_disable = True
_in_place._torchdynamo_disable_msg = _WHY


def _is_ours(file: str) -> bool:
    return file.startswith(_EAGER) and file != _TRACED


def _ends_graph(caller: Any, function: Any) -> bool:
    """Whether a function that is about to be traced is ours, called by others, where the graph may break."""
    root = caller.output.root_tx
    if getattr(root, "one_graph", True) or getattr(caller, "error_on_graph_break", False):
        return False
    instruction = caller.current_instruction.opname
    return (
        instruction.startswith(_CALLS) and _is_ours(function.get_filename()) and not _is_ours(caller.f_code.co_filename)
    )


def _learn(caller: Any, root: Any, function: Any) -> None:
    """Note the class of the module that calls one of our functions that belongs to no class."""
    if "." in function.get_function().__qualname__:
        return
    stack = list(caller.nn_module_stack.values())
    module = _self_of(root)
    module_class = stack[-1][1] if stack else type(module)
    if isinstance(module_class, type) and module_class not in _callers:
        _callers.add(module_class)
        _eager.clear()


def _self_of(frame: Any) -> Any:
    """The object whose method a frame runs."""
    value = frame.f_locals.get("self")
    return value.cell_contents if isinstance(value, types.CellType) else value


def _runs_eagerly(frame: Any) -> bool:
    """Whether a frame is a sparse module's, or ours."""
    import torch
    from torch._dynamo import symbolic_convert

    if getattr(symbolic_convert, "_get_error_on_graph_break", bool)():
        return False
    if _is_ours(frame.f_code.co_filename):
        return True
    module = _self_of(frame)
    if not isinstance(module, torch.nn.Module) or "_modules" not in vars(module):  # or its `__init__` has yet to run
        return False
    return frame.f_code.co_name != "__init__" and is_sparse(module)


def is_sparse(module: Any) -> bool:
    """Whether a module is one eager call: it has sparse layers, and too few dense ones to pay for breaks between.

    The first break costs little; each further one must gain two dense layers. So a detector is traced, its
    backbone is not, and a backbone with a squeeze-and-excitation in each block is one call.
    """
    known = _eager.get(module)
    if known is None:
        from .. import protocol

        parts, dense = _count(module)
        module_class: Any = type(module)
        own = protocol.root_of(module_class) is not None
        known = _eager[module] = own or (parts > 0 and dense <= 2 * (parts - 1))
    return known


def _count(module: Any) -> tuple[int, int]:
    """How many eager calls would be made inside of a module that is traced, of layers that have parameters; and how
    many dense layers are outside of these."""
    from .. import protocol

    parts = dense = 0
    for child in module.children():
        more = (int(any(True for _ in child.parameters())), 0) if is_sparse(child) else _count(child)
        parts, dense = parts + more[0], dense + more[1]
    if type(module) in _callers or protocol.name_of(type(module)) is not None:
        return max(parts, 1), dense
    own = any(parameter is not None and parameter.ndim > 1 for parameter in module._parameters.values())
    return parts, dense + own
