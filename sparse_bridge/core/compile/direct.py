"""Calls of operators past the dispatcher.

The dispatcher turns every argument into its own form and back, which takes longer than a small
operator. Compiled graphs call operators on plain tensors that need no gradient; where nobody
records, transforms or watches operations either, it would do nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from ..device.frame_stack import with_room

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_modes, _functions = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_recorded, _profiled = torch._C._get_tracing_state, torch._C._autograd._profiler_enabled
_learning = torch.is_grad_enabled


def shorten(operator: Any, run: Callable[..., Any]) -> None:
    """Have calls of `operator` from Python be calls of `run` where the dispatcher would only pass
    on the arguments. A release of torch whose operators are called in another way does without, and
    so do operators of lists of tensors."""
    dispatched = getattr(operator, "_op", None)
    arguments = operator._schema.arguments
    type_names = [str(argument.type) for argument in arguments]
    if dispatched is None or any("List[Tensor]" in type_name for type_name in type_names):
        return
    tensors = tuple(i for i, type_name in enumerate(type_names) if "Tensor" in type_name)
    count = len(arguments)

    def call(*args: Any, **more: Any) -> Any:
        if (
            more
            or len(args) != count
            or _modes()
            or _functions()
            or _transforms()
            or forward_ad._current_level >= 0
            or _recorded()
            or _profiled()
        ):
            return dispatched(*args, **more)
        learning = _learning()
        for i in tensors:
            value = args[i]
            if value is None:
                continue
            if type(value) not in _PLAIN or value.is_meta or (learning and value.requires_grad):
                return dispatched(*args)
        return run(*args)

    # Inductor's one large function may leave little of its piece of the frame stack. Graphs that
    # break do not look into the engine.
    operator._op = torch.compiler.disable(with_room(call))
