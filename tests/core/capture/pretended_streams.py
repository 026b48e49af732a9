"""Streams of a GPU that is not there: which one is current, who waits for whom, and who touches
memory that another one may still be using.

Work over CPU tensors runs at once, in the order of the program, so results never show that an order
was missing between streams. What torch does is therefore noted with the stream that it would be
queued on: an access that is not ordered after the last one of another stream raises `Race`.
"""

from __future__ import annotations

import contextlib
import threading

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Race(BaseException):  # nobody who tries something out is to take it for a failure
    """Two streams touch the same memory, one of them writes, and neither waits for the other."""


def _joined(one, other):
    return {key: max(one.get(key, 0), other.get(key, 0)) for key in one.keys() | other.keys()}


class Stream:
    """seen: of every stream, how much of its work comes before what is queued here from now on."""

    def __init__(self, streams, number):
        self.streams, self.number, self.seen = streams, number, {}

    def wait_stream(self, other):
        self.seen = _joined(self.seen, other.seen)

    wait_event = wait_stream

    def synchronize(self):
        self.streams.host = _joined(self.streams.host, self.seen)


class Event:
    def __init__(self, streams):
        self.streams, self.seen = streams, {}

    def record(self, stream=None):
        self.seen = dict((stream or self.streams.current()).seen)

    def synchronize(self):
        self.streams.host = _joined(self.streams.host, self.seen)


class Streams:
    """All of them. host: what the host has waited for, so that whatever it queues comes later."""

    def __init__(self):
        self.known = []
        self.host = {}
        self._local = threading.local()
        self._default = self.new()
        self.ignored = set()  # keys
        self._held = {}  # what is touched, by id: (kept alive, last write, reads since)

    def new(self, *_):
        self.known.append(Stream(self, len(self.known)))
        return self.known[-1]

    def current(self, *_):
        return getattr(self._local, "current", self._default)

    def numbered(self, number, *_):
        return self.known[number]

    def event(self, *_):
        return Event(self)

    @contextlib.contextmanager
    def on(self, stream):
        before = self.current()
        self._local.current = stream
        try:
            yield
        finally:
            self._local.current = before

    def touch(self, key, held, writes, what):
        """The current stream reads or writes something; `held` keeps `key` from being reused."""
        if key in self.ignored:
            return
        stream = self.current()
        stream.seen = _joined(stream.seen, self.host)
        stream.seen[stream.number] = stream.seen.get(stream.number, 0) + 1
        now = stream.number, stream.seen[stream.number], what
        _, written, reads = self._held.get(key, (held, None, []))
        for number, count, before in [*([written] if written else []), *(reads if writes else [])]:
            if stream.seen.get(number, 0) < count:
                raise Race(f"{what} on stream {stream.number}, {before} on stream {number}")
        self._held[key] = held, now if writes else written, [] if writes else [*reads, now]


class Watching(TorchDispatchMode):
    """Notes what torch's operators read and write."""

    def __init__(self, streams):
        super().__init__()
        self.streams = streams

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        schema, kwargs = func._schema, kwargs or {}
        out = func(*args, **kwargs)
        given = list(zip(schema.arguments, args, strict=False))
        given += [(one, kwargs[one.name]) for one in schema.arguments if one.name in kwargs]
        sizes_only = schema.name.endswith("_like") or "::new_" in schema.name
        for argument, value in given:
            alias = argument.alias_info
            if alias is None and not sizes_only:
                self._touch(value, False, schema.name)
            elif alias is not None and alias.is_write:
                self._touch(value, True, schema.name)
        values = (out,) if len(schema.returns) == 1 else out
        for result, value in zip(schema.returns, values or (), strict=False):
            if result.alias_info is None:
                self._touch(value, True, schema.name)
        if schema.name == "aten::_local_scalar_dense":  # the host waits
            self.streams.current().synchronize()
        return out

    def _touch(self, value, writes, what):
        if isinstance(value, (list, tuple)):
            for one in value:
                self._touch(one, writes, what)
        elif type(value) in (torch.Tensor, torch.nn.Parameter) and value.numel():
            storage = value.untyped_storage()
            self.streams.touch(storage._cdata, StorageWeakRef(storage), writes, what)
