"""Results of convolutions that wait for the features which are about to be added to them.

In a residual block a convolution's result is added to other features at once. Added in the
convolution's own store they cost one read. So the launch waits for the sum; whatever else is done
with the result launches the convolution first and sees what it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Launch = Callable[["torch.Tensor | None"], torch.Tensor]
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Deferred(torch.Tensor):
    """A tensor without memory: what `launch(None)` computes from the features `x`.

    shape: of the result, whose dtype and device are x's.  launch: given features like the result,
    it computes what follows the sum of both; it may be asked more than once.  summed: told of that.
    """

    _x: torch.Tensor
    _launch: Launch
    _summed: Callable[[torch.Tensor], None]
    _result: torch.Tensor | None
    _seen: int
    _stream: int | None
    # The operators below are methods; everything else arrives in `__torch_dispatch__`.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, shape: tuple[int, int], x: torch.Tensor, launch: Launch, summed: Callable[[torch.Tensor], None]
    ) -> Deferred:
        made: Deferred = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=x.dtype, device=x.device)
        # Extensions that ask for the memory, of which there is none, get an exception.
        torch._C._set_throw_on_mutable_data_ptr(made)
        made._x, made._launch, made._summed, made._result = x, launch, summed, None
        made._seen = _changes(x)
        made._stream = torch._C._cuda_getCurrentRawStream(x.device.index) if x.is_cuda else None
        return made

    def result(self) -> torch.Tensor:
        """The convolution's result, computed once."""
        if self._result is None:
            if self._here():
                self._result = self._run(None)
            else:  # the layer's own stream, for which this one waits
                there = torch.cuda.ExternalStream(self._stream, self.device)
                with torch.cuda.stream(there):
                    self._result = self._run(None)
                torch.cuda.current_stream(self.device).wait_stream(there)
        return self._result

    def _here(self) -> bool:
        return self._stream is None or torch._C._cuda_getCurrentRawStream(self.device.index) == self._stream

    def _run(self, residual: torch.Tensor | None) -> torch.Tensor:
        if _changes(self._x) != self._seen:
            raise RuntimeError(
                "the input of a convolution was changed in place before the sum that optimize() "
                "fused into it; call sparse_bridge.restore(model)."
            )
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._launch(residual)
        return self._launch(residual)

    def _plus(self, other: Any) -> torch.Tensor | None:
        """The sum with `other` in one launch; None where it takes two."""
        if type(other) is Deferred:
            other = other.result()
        if (
            self._result is not None
            or type(other) not in _PLAIN
            or other.shape != self.shape
            or other.dtype != self.dtype
            or other.device != self.device
            or (torch.is_grad_enabled() and other.requires_grad)
            or not self._here()
        ):
            return None
        found = self._run(other)
        self._summed(found)
        return found

    def __add__(self, other: Any) -> Any:
        return _sum(self, other)

    def __radd__(self, other: Any) -> Any:
        return _sum(other, self)

    def __iadd__(self, other: Any) -> Any:  # type: ignore[misc]
        return self.add_(other)

    def add_(self, other: Any, *, alpha: Any = 1) -> torch.Tensor:
        """Whoever holds this tensor sees the sum."""
        found = self._plus(other) if alpha == 1 else None
        if found is None:
            return self.result().add_(_plain(other), alpha=alpha)
        self._result = found
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.add.Tensor and len(args) == 2 and not kwargs:
            return _sum(*args)
        named = {name: _plain(value) for name, value in (kwargs or {}).items()}
        return func(*_plain(args), **named)


def _of_the_result(name: str) -> Callable[..., Any]:
    def method(self: Deferred, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.result(), name)(*args, **kwargs)

    method.__name__ = name
    return method


# What asks for memory without an operation of torch's in between.
for _name in (
    "__array__",
    "__deepcopy__",
    "__dlpack__",
    "__reduce_ex__",
    "data_ptr",
    "numpy",
    "storage",
    "tolist",
    "untyped_storage",
):
    setattr(Deferred, _name, _of_the_result(_name))


def _changes(x: torch.Tensor) -> int:
    """How often `x` was changed in place; nobody counts for tensors of inference mode."""
    return 0 if x.is_inference() else x._version


def _plain(value: Any) -> Any:
    """With results for what is deferred."""
    if type(value) is Deferred:
        return value.result()
    if type(value) in (list, tuple):
        return type(value)([_plain(one) for one in value])
    return value


def _sum(a: Any, b: Any) -> Any:
    for one, other in ((a, b), (b, a)):
        if type(one) is Deferred:
            found = one._plus(other)
            if found is not None:
                return found
    return _plain(a) + _plain(b)
