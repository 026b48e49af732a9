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
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from ....hooks import IN_PLACE_OF
from ....kernels.runtime.target import capturing, device_index
from ....refusals import Refusal, Why

MOST = 4096  # numbers in a tensor

_OWN = tuple(f"{folder}{os.sep}" for folder in (pathlib.Path(__file__).parents[3], os.path.dirname(torch.__file__)))
_local = threading.local()


class NumberTensors:
    """What a model's graphs read of such numbers; it lives as long as they do."""

    def __init__(self) -> None:
        self._sent: dict[tuple[torch.device, torch.dtype, torch.Size, bytes], torch.Tensor] = {}

    @contextlib.contextmanager
    def served(self, device: torch.device) -> Iterator[None]:
        """In this block a program's tensors of numbers on `device`, in this thread, are copies on the device."""
        outer = getattr(_local, "serving", None)
        with _in_place():
            _local.serving = self, device
            try:
                yield
            finally:
                _local.serving = outer

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
        """Whether it is one of those that were sent."""
        storage = tensor.untyped_storage()._cdata
        return any(sent.untyped_storage()._cdata == storage for sent in list(self._sent.values()))


def is_sent(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds numbers that this thread's graph will read: they stay."""
    serving = getattr(_local, "serving", None)
    return serving is not None and serving[0].holds(tensor)


def _made(serving: Any, original: Callable[..., Any], like: tuple[Any, ...], args: Any, named: dict[str, Any]) -> Any:
    """The tensor that `original` makes of these arguments, or a copy of the one that was sent.

    like: the tensor whose method `original` is.
    """
    numbers, device = serving
    if len(args) == 1 and named.keys() <= {"dtype", "device"} and _are_numbers(args[0]):
        asked = named.get("device")
        asked = like[0].device if asked is None and like else asked or torch.get_default_device()
        if _same(torch.device(asked), device):
            return numbers.sent(lambda: original(*like, *args, **{**named, "device": "cpu"}), device).clone()
    return original(*like, *args, **named)


def _indexed(
    serving: Any, original: Callable[..., Any], like: tuple[Any, ...], args: Any, named: dict[str, Any]
) -> Any:
    """A tensor at an index, in which lists of numbers are tensors that were sent."""
    numbers, device = serving
    (index,) = args
    if _same(like[0].device, device):
        parts = [
            numbers.sent(functools.partial(torch.tensor, part, device="cpu"), device) if _are_places(part) else part
            for part in (index if type(index) is tuple else (index,))
        ]
        index = tuple(parts) if type(index) is tuple else parts[0]
    return original(*like, index)


def _are_places(part: Any) -> bool:
    return type(part) is list and 0 < len(part) <= MOST and all(type(place) is int for place in part)


def _same(asked: torch.device, device: torch.device) -> bool:
    return asked.type == device.type and device_index(asked) == device_index(device)


def _are_numbers(data: Any) -> bool:
    """Whether these are a few numbers, of Python or numpy, in lists and tuples of any depth."""
    if isinstance(data, (list, tuple)):
        return len(data) <= MOST and all(map(_are_numbers, data))
    if isinstance(data, np.ndarray):
        return data.size <= MOST and data.dtype.kind in "biuf"
    return isinstance(data, (bool, int, float, np.bool_, np.integer, np.floating))


class _InPlace:
    """Puts functions before torch's own while any thread runs a model over a padded input."""

    places = (torch, "tensor"), (torch, "as_tensor"), (torch.Tensor, "new_tensor"), (torch.Tensor, "__getitem__")

    def __init__(self) -> None:
        self._lock, self._threads = threading.Lock(), 0
        self._put: list[tuple[Any, str, Any, Any]] = []

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._threads += 1
            if self._threads == 1:
                self._put = [(place, name, _before(place, name), vars(place).get(name)) for place, name in self.places]
                for place, name, function, _ in self._put:
                    setattr(place, name, function)
        try:
            yield
        finally:
            with self._lock:
                self._threads -= 1
                if not self._threads:
                    self._take_back()

    def forget(self) -> None:
        """Take all back, in a process that was forked meanwhile: its other threads are gone."""
        self._lock, self._threads = threading.Lock(), 0
        self._take_back()

    def _take_back(self) -> None:
        for place, name, function, own in self._put:
            if vars(place).get(name) is not function:  # a program's by now
                continue
            if own is None:  # a method of the class in C
                delattr(place, name)
            else:
                setattr(place, name, own)
        self._put = []


def _before(place: Any, name: str) -> Callable[..., Any]:
    """A function that stands before the one of this name, for a program: torch and this package may keep what they
    make."""
    original, count = getattr(place, name), int(place is torch.Tensor)
    made = _indexed if name == "__getitem__" else _made

    @functools.wraps(original)
    def function(*args: Any, **named: Any) -> Any:
        serving = getattr(_local, "serving", None)
        if serving is None or sys._getframe(1).f_code.co_filename.startswith(_OWN):
            return original(*args, **named)
        return made(serving, original, args[:count], args[count:], named)

    setattr(function, IN_PLACE_OF, original)
    return function


_in_place = _InPlace()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_place.forget)
