"""What releases of torch can trace, and what they have of the registration of operators."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
# Before torch 2.8 tracing fails on slots, enums and properties that layers read, or behind breaks.
WHOLE_GRAPHS = RELEASE >= (2, 8)
_dynamo: Any = getattr(torch._C, "_dynamo", None)  # as an attribute: torch 2.4 cannot import it
# What compares tensors at once, or None: layers wait for what follows them then.
TENSOR_GUARDS: Any = getattr(getattr(_dynamo, "guards", None), "TensorGuards", None)
# What tells the hooks of saved tensors in force, as checkpoints set them; None before torch 2.1.
SAVED_TENSORS_HOOKS: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
# Whether the backward pass under way comes to a node of autograd; before torch 2.1 it is taken for granted.
executes_node: Callable[[Any], bool] = getattr(torch._C, "_will_engine_execute_node", lambda _: True)
# How torch's own switch for sums of fp16 products in fp16 stands, `torch.backends.cuda.matmul.allow_fp16_accumulation`
# of torch 2.7. Called at every layer, so without a function of Python around it.
allows_fp16_sums: Callable[[], bool] = getattr(torch._C, "_get_cublas_allow_fp16_accumulation", lambda: False)
# torch's own switch for fp32 products: "tf32" where they may round to TF32. By its name of torch 2.9, as the older one
# raises RuntimeError in a program that has set `fp32_precision`. Called at every layer, as above.
matmul_precision: Callable[[], str] = (
    functools.partial(torch._C._get_fp32_precision_getter, "cuda", "matmul")
    if hasattr(torch._C, "_get_fp32_precision_getter")
    else lambda: "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
)
# The innermost transform of functions in force, such as vmap; None: there is none.
transform: Callable[[], Any] = getattr(torch._C._functorch, "peek_interpreter_stack", lambda: None)
# What tells the allocator of CUDA memory its settings, as PYTORCH_CUDA_ALLOC_CONF has them; None: nothing does.
set_allocator: Callable[[str], Any] | None = getattr(
    torch._C,
    "_accelerator_setAllocatorSettings",  # torch 2.9
    getattr(torch._C, "_cuda_cudaCachingAllocator_set_allocator_settings", None),
)
BATCHED = hasattr(torch.library, "register_vmap")  # torch 2.5; before, torch itself refuses vmap


def allows_tf32() -> bool:
    """Whether torch may round fp32 products to TF32, in a graph that `torch.compile` makes as well: it knows the older
    switch alone."""
    if torch.compiler.is_compiling():
        return bool(torch.backends.cuda.matmul.allow_tf32)
    return matmul_precision() == "tf32"


def guards(*tensors: torch.Tensor, any_rows: bool = False) -> Callable[..., bool]:
    """Whether other tensors are of the same kinds and sizes (any shape and dtype), as one question. For callers who
    know that there are `TENSOR_GUARDS`.  any_rows: whatever the rows of the first."""
    sizes: Any = [list(tensor.shape) for tensor in tensors]
    if any_rows:
        sizes[0][0] = None
    strides: Any = [list(tensor.stride()) for tensor in tensors]
    same: Callable[..., bool]
    same = TENSOR_GUARDS(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return same


F = TypeVar("F", bound=Callable[..., Any])


def _left_alone() -> Callable[[Any], None] | None:
    """What marks a code object whose frames compilers are to leave alone, with all that they call;
    None where torch has nothing of the kind."""
    frames: Any = getattr(_dynamo, "eval_frame", None)
    actions = getattr(frames, "_FrameAction", None)
    if actions is None or not hasattr(frames, "set_code_exec_strategy"):
        return None
    skip = frames._FrameExecStrategy(actions.SKIP, actions.SKIP)
    return lambda code: frames.set_code_exec_strategy(code, skip)


_leave_alone = _left_alone()


def eagerly(function: F) -> F:
    """Have `function` run as it is where a compiled program calls it between two graphs: such calls
    are compiled, too, by themselves. The mark is on its code, and calls cost what they did.

    While a program is traced, functions are traced into all the same; see `apart`.
    """
    if _leave_alone is not None:
        _leave_alone(function.__code__)
    return function


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` between two graphs, while a program is traced."""
    from .apart import apart

    return apart(function, *args)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """In this block operations run, on the CPU unless told otherwise, whatever traces, batches or replaces those
    around it."""
    # Imported where it is needed: it brings much of torch.
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with torch._C.DisableTorchFunction(), _disable_current_modes(), temporarily_clear_interpreter_stack():
        yield
