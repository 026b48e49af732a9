"""What several streams of a GPU may use: queued on one of them, waited for by the others."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ...kernels.runtime import target as targets

# Held while one stream is made to wait for another, and while a capture begins: what waits for a
# stream that is being captured becomes part of the capture.
waiting = threading.Lock()

_STREAMS = 32  # of each priority, that torch gives out in turn

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def of(device: torch.device) -> StreamOrder | None:
    """The order of something queued now on the current stream; None where there are no streams."""
    return StreamOrder(device) if device.type == "cuda" else None


def _anew(device: torch.device) -> StreamOrder | None:
    """Of a copy, perhaps in another process, where streams have other numbers or there are none."""
    return of(device) if torch.cuda.is_available() else None


def number_of(device: torch.device) -> Callable[[], int]:
    """What tells the number of the current stream."""
    return _number_of(targets.device_index(device))


@functools.cache
def _number_of(index: int) -> Callable[[], int]:
    return functools.partial(torch._C._cuda_getCurrentRawStream, index)


class Streams:
    """The current stream of a GPU, for whoever asks in every call: torch takes microseconds to make
    the object, and none to tell its number."""

    def __init__(self, device: torch.device) -> None:
        self._index, self._number_of = targets.device_index(device), number_of(device)
        self._number: int | None = None
        self._stream: torch.cuda.Stream | None = None

    def current(self) -> torch.cuda.Stream:
        """The current stream of this thread; made anew only where its number is another one."""
        number = self._number_of()
        if self._stream is None or number != self._number:
            self._stream, self._number = torch.cuda.current_stream(self._index), number
        return self._stream


def capture_stream(device: torch.device, taken: Container[torch.cuda.Stream]) -> torch.cuda.Stream:
    """A stream to capture on that no other thread works on, and, if possible, none of those that are `taken`.

    torch has 32 streams of each priority and gives the same ones out again and again. So a stream
    of the usual priority may be one that a program holds, whose launches would become part of the
    capture. Programs rarely ask for the high one, and what captures on one is `alone_on` it.
    """
    for _ in range(_STREAMS):
        stream = torch.cuda.Stream(device, -1)
        if stream not in taken:
            break
    return stream


_users: dict[Any, threading.RLock] = {}  # at most so many streams as torch has


def alone_on(stream: torch.cuda.Stream) -> threading.RLock:
    """The lock of whoever captures on a stream, which two of them may have been given."""
    return _users.setdefault(stream, threading.RLock())


def note_use(tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Have the memory of a CUDA tensor (any shape and dtype) wait for a stream before it is given to others. On
    other devices there is nothing to note."""
    if tensor.is_cuda:
        with _disable_current_modes():  # what watches a model's operations is not told
            tensor.record_stream(stream)


def captures_on(stream: torch.cuda.Stream) -> bool:
    """Whether another thread captures on a stream now, on which no event may be recorded then. It
    has synchronized before, so that nothing that was queued there earlier is to be waited for."""
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


class StreamOrder:
    """The stream that something was queued on last. Others wait for it, once.

    number: tells the number of the current stream.  waited: numbers of those that need not wait.
    """

    __slots__ = ("_device", "number", "waited")

    def __init__(self, device: torch.device) -> None:
        self._device, self.number = device, number_of(device)
        self.waited = [self.number()]  # the first one queued it

    def wait(self, tensors: Callable[[], Iterable[torch.Tensor]] = tuple) -> None:
        """Have the current stream go on after what was queued. A capture cannot wait for other streams: whoever
        captures has synchronized before.

        tensors: tells the tensors (any shape and dtype) that it will read. Their memory may go back to the stream that
        it is from once this one is through with it, not before.
        """
        if torch.compiler.is_compiling():  # nothing is read while a program is traced
            return
        if self.number() in self.waited or torch.cuda.is_current_stream_capturing():
            return
        current = torch.cuda.current_stream(self._device)
        queued_on = torch.cuda.ExternalStream(self.waited[0], self._device)
        with waiting:
            if not captures_on(queued_on):
                current.wait_stream(queued_on)
        for tensor in tensors():
            note_use(tensor, current)
        self.waited.append(self.number())

    def queued(self) -> None:
        """More was queued now, on the current stream, which has waited for the rest."""
        self.waited = [self.number()]

    def __reduce__(self) -> Any:
        return _anew, (self._device,)


class StreamCache(Generic[_Key, _Value]):
    """Values on a device, by key: whoever takes one goes on after it was queued."""

    def __init__(self) -> None:
        self._entries: dict[_Key, tuple[_Value, StreamOrder | None]] = {}

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._entries)

    def get(self, key: _Key) -> _Value | None:
        """The value under a key, for work on the current stream; None where there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        value, order = entry
        if order is not None:
            order.wait(lambda: (value,) if isinstance(value, torch.Tensor) else ())
        return value

    def put(self, key: _Key, value: _Value, device: torch.device) -> _Value:
        """Keep what was queued on the current stream of `device`."""
        self._entries[key] = value, of(device)
        return value
