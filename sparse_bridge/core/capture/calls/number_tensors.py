"""Tensors that a model makes of Python numbers in its forward, as by `torch.tensor(self.voxel_size, device=x.device)`
or `coords[:, [2, 1, 0]]`.

The host waits for the copy of the numbers to the device, which a stream that is captured does not allow. So a model
over a padded input gets copies, made on the device, of tensors that were sent before the capture. Where its Python
comes to other numbers in the capture, the call is refused.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from ....kernels.runtime.target import capturing, device_index
from ....refusals import Refusal, Why

MOST = 4096  # numbers in a tensor

_METHODS = (torch.Tensor.new_tensor, torch.Tensor.__getitem__)
_MAKING = (torch.tensor, torch.as_tensor, *_METHODS)
_OWN = tuple(f"{folder}{os.sep}" for folder in (pathlib.Path(__file__).parents[3], os.path.dirname(torch.__file__)))


class NumberTensors:
    """What a model's graphs read of such numbers; it lives as long as they do."""

    def __init__(self) -> None:
        self._sent: dict[tuple[torch.device, torch.dtype, torch.Size, bytes], torch.Tensor] = {}

    def served(self, device: torch.device, first: bool) -> contextlib.AbstractContextManager[Any]:
        """In this block a program's tensors of numbers on `device`, in this thread, are copies on the device.

        first: it is the trial that looks for them. What follows is left alone if there were none, as layers under a
        mode of torch launch more."""
        return _Served(self, device) if first or self._sent else contextlib.nullcontext()

    def sent(self, make: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
        """The tensor on `device` of the numbers that `make` returns on the CPU, not to be changed. Raises Refusal in a
        capture before which they were not sent."""
        with _disable_current_modes(), torch.inference_mode(False):
            host = make().clone()
            key = device, host.dtype, host.shape, host.flatten().view(torch.uint8).numpy().tobytes()
            if key not in self._sent:
                if capturing(device):
                    raise Refusal(Why.GRAPH_FOREIGN_TENSOR, list(host.shape))
                self._sent[key] = host.to(device, copy=True)
        return self._sent[key]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether it is one of those that were sent: they stay."""
        storage = tensor.untyped_storage()._cdata
        return any(sent.untyped_storage()._cdata == storage for sent in list(self._sent.values()))


class _Served(TorchFunctionMode):
    def __init__(self, numbers: NumberTensors, device: torch.device) -> None:
        super().__init__()
        self._numbers, self._device = numbers, device

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        # torch and this package may keep what they make.
        if func not in _MAKING or sys._getframe(1).f_code.co_filename.startswith(_OWN):
            return func(*args, **named)
        if func is torch.Tensor.__getitem__:
            return func(args[0], self._index(*args))
        like = args[:1] if func in _METHODS else ()
        return self._made(func, like, args[len(like) :], named)

    def _made(self, func: Callable[..., Any], like: tuple[Any, ...], args: Any, named: dict[str, Any]) -> Any:
        """The tensor that `func` makes of these arguments, or a copy of the one that was sent. like: the tensor whose
        method it is."""
        if len(args) == 1 and named.keys() <= {"dtype", "device"} and _are_numbers(args[0]):
            asked = named.get("device")
            if asked is None:
                asked = like[0].device if like else torch.get_default_device()
            if self._here(torch.device(asked)):
                return self._sent(lambda: func(*like, *args, **{**named, "device": "cpu"})).clone()
        return func(*like, *args, **named)

    def _index(self, like: torch.Tensor, index: Any) -> Any:
        """An index of a tensor, in which lists of numbers are tensors that were sent."""
        if not self._here(like.device):
            return index
        parts = [
            self._sent(functools.partial(torch.tensor, part, device="cpu")) if _are_places(part) else part
            for part in (index if type(index) is tuple else (index,))
        ]
        return tuple(parts) if type(index) is tuple else parts[0]

    def _sent(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return self._numbers.sent(make, self._device)

    def _here(self, asked: torch.device) -> bool:
        return asked.type == self._device.type and device_index(asked) == device_index(self._device)


def _are_places(part: Any) -> bool:
    return type(part) is list and 0 < len(part) <= MOST and all(type(place) is int for place in part)


def _are_numbers(data: Any) -> bool:
    """Whether these are a few numbers, of Python or numpy, in lists and tuples of any depth."""
    if isinstance(data, (list, tuple)):
        return len(data) <= MOST and all(map(_are_numbers, data))
    if isinstance(data, np.ndarray):
        return data.size <= MOST and data.dtype.kind in "biuf"
    return isinstance(data, (bool, int, float, np.bool_, np.integer, np.floating))
