"""Where operators are registered: the library `sparse_bridge` of `torch.ops`.

Operators serve while a program is traced (`torch.compile`, `torch.export`) and under selective
checkpoints, which choose by operator; other eager layers call the engine directly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...errors import UnsupportedError
from ..device.no_double_backward import NO_SECOND_ORDER
from ..device.torch_compat import BATCHED

NAMESPACE = "sparse_bridge"
ops: Any = torch.ops.sparse_bridge
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
operator_names: list[str] = []
_TAGS = tuple(
    tag for name, tag in torch.Tag.__members__.items() if name == "cudagraph_unsafe"
)  # maps have other sizes and addresses at every call


def define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register an operator: `run` on any device, `fake` for tensors without data."""
    _library.define(f"{name}{schema}", tags=_TAGS)
    opaque = torch.compiler.disable(run)  # graphs that break do not look into the engine
    operator_names.append(name)
    _library.impl(name, opaque, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    if BATCHED:
        torch.library.register_vmap(f"{NAMESPACE}::{name}", _no_vmap(name), lib=_library)


def names() -> list[str]:
    """The operators that are registered."""
    return sorted(operator_names)


def differentiate(name: str, setup: Callable[..., None], backward: Callable[..., Any] | None) -> None:
    """Give an operator its gradient; None: one that says that there is none of a second order."""
    full = f"{NAMESPACE}::{name}"
    backward = backward or _no_second_order
    torch.library.register_autograd(full, backward, setup_context=setup, lib=_library)


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Gradients inside of an operator, where torch records none."""
    key = torch._C.DispatchKey.AutogradFunctionality
    with torch._C._SetExcludeDispatchKeyGuard(key, False), torch.enable_grad():
        yield


def _no_vmap(name: str) -> Callable[..., Any]:
    def refuse(*ignored: Any) -> Any:
        raise UnsupportedError(
            f"torch.func.vmap over {NAMESPACE}::{name}: rows of a sparse tensor are no batch "
            "dimension. Put the samples into one tensor, by batch index."
        )

    return refuse


def _no_second_order(*ignored: Any) -> Any:
    raise UnsupportedError(NO_SECOND_ORDER)


def forget(ctx: Any, inputs: Any, output: Any) -> None:
    """`setup_context` of an operator whose gradient refuses."""
