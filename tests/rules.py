"""Rules of size that small inputs never reach, set so that they do: for tests and their fixtures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


@contextlib.contextmanager
def ruled(owner: Any, **values: Any) -> Iterator[None]:
    """Numbers of a module, which has to have them, as given."""
    with contextlib.ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def layers_deferred(elements: int = 0) -> contextlib.AbstractContextManager[None]:
    """Layers of so many elements or more are deferred, on every device."""
    from sparse_bridge.core.conv import convolution

    return ruled(convolution, MIN_DEFERRED_ELEMENTS=[elements] * 2)


def row_kernels_on(device: str) -> contextlib.AbstractContextManager[None]:
    """Layers of kernel volume 1 take kernels of rows there."""
    from sparse_bridge.core.ops import pointwise

    return ruled(pointwise, DEVICES=(device,))


class _Unmade(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x.new_empty(x.shape[0], w.shape[1])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return tuple(map(torch.empty_like, ctx.saved_tensors))


def products_unmade() -> contextlib.AbstractContextManager[None]:
    """Torch's products of rows are memory and nothing else: of halves a CPU is slow."""
    from sparse_bridge.core.device import rocm

    def product(x: Any, w: Any, bias: Any = None) -> Any:
        return _Unmade.apply(x, w)

    return ruled(rocm, linear=product, mm=product)


class Rules:
    """The same until a test is over."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def set(self, owner: Any, **values: Any) -> None:
        self._stack.enter_context(ruled(owner, **values))

    def hold(self, *rules: contextlib.AbstractContextManager[None]) -> None:
        for rule in rules:
            self._stack.enter_context(rule)

    def over(self) -> None:
        self._stack.close()
