"""The one GPU that is not there: what torch, Triton and the package are asked about a device, as a
test states it. Everything else, from the choice of a kernel to its launcher, is the package's own;
launches of the compiled helper end in `tests.fake_driver`.

    def test_something(fake_gpu):
        fake_gpu.has(target=HOPPER, hip="7.2.1")
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from sparse_bridge.core.device import stream_order
from sparse_bridge.core.geometry import boxes
from sparse_bridge.kernels.runtime import target as targets

HOPPER = targets.Target("cuda", "sm_90", 32, 132, 227 << 10, raw=True)
Members = Iterator[tuple[Any, str, Any]]


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


# What torch.cuda is asked: name of the fact, and of the function that answers it with any arguments.
_ANSWERS = {
    "available": "is_available",
    "initialized": "is_initialized",
    "count": "device_count",
    "device": "current_device",
    "name": "get_device_name",
    "capability": "get_device_capability",
    "properties": "get_device_properties",
    "capturing": "is_current_stream_capturing",
    "free_memory": "mem_get_info",
    "reserved_memory": "memory_reserved",
    "allocated_memory": "memory_allocated",
}
# What torch.cuda does: whoever stands in is called instead.
_ACTIONS = {
    "memory_stats": "memory_stats_as_nested_dict",
    "reset_peaks": "reset_peak_memory_stats",
    "set_memory_share": "set_per_process_memory_fraction",
    "empty_cache": "empty_cache",
    "synchronize": "synchronize",
    "current_stream": "current_stream",
    "graph": "CUDAGraph",
    "graph_pool": "graph_pool_handle",
    "enter": "device",
}


def _of_streams(streams: Any) -> Members:
    """Streams of `tests.core.capture.pretended_streams`."""
    members = {"Stream": streams.new, "Event": streams.event, "stream": streams.on}
    members |= {"current_stream": streams.current, "ExternalStream": streams.numbered}
    for name, value in members.items():
        yield torch.cuda, name, value


def _of_order(streams: Any) -> Members:
    """Maps of CPU tensors are ordered between streams as on a GPU."""
    yield stream_order, "of", stream_order.StreamOrder
    yield from _of_numbered(streams)
    for module in (targets, boxes):
        yield module, "current_stream", lambda _: streams.current().number


def _of_numbered(streams: Any) -> Members:
    return _of_number(lambda: streams.current().number)


def _of_number(number: Callable[[], int]) -> Members:
    yield stream_order, "number_of", _always(number)


def _launch() -> Any:
    from sparse_bridge.kernels.runtime import launch

    return launch


def _of_launches(launch: Any) -> Members:
    # A function, so that it is a method.
    yield _launch().Kernel, "launch", lambda kernel, *args: launch(kernel, *args)


def _of_compiled(entries: Any) -> Members:
    """Every variant of a kernel is there: `tests.fake_driver.entry_of` makes one that does nothing."""
    for kernel, entry in entries.items():
        yield kernel, "_compiled", Compiled(entry)


def _of_raw(current: Any) -> Members:
    """current: what torch's own C function says of the current device."""
    yield torch._C, "_cuda_getDevice", _always(current)
    yield torch._C, "_cuda_getCurrentRawStream", _always(0)


def _of_driver(driver: Any) -> Members:
    import triton.runtime

    yield triton.runtime, "driver", driver


def _of_host_memory(_: Any) -> Members:
    """Pinned memory is like any other."""
    empty = torch.empty
    yield torch, "empty", lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs)


_FACTS: dict[str, Callable[[Any], Members]] = {
    "target": lambda it: iter([(targets, "of", _always(it)), (targets, "unavailable", _always(None))]),
    "unavailable": lambda it: iter([(targets, "unavailable", it)]),
    "triton": lambda it: iter([(targets, "triton_version", _always(it))]),
    "interpreted": lambda it: iter([(targets, "interpreted", _always(it))]),
    "captures": lambda it: iter([(targets, "capturing", it)]),
    "hip": lambda it: iter([(torch.version, "hip", it)]),
    "intel": lambda it: iter([(torch.xpu, "get_device_properties", _always(it))]),
    "autocast": lambda it: iter(
        [(torch, "is_autocast_enabled", "cuda".__eq__), (torch, "get_autocast_dtype", _always(it))]
    ),
    "streams": _of_streams,
    "ordered": _of_order,
    "numbered": _of_numbered,
    "stream_number": lambda it: _of_number(_always(it)),
    "launches": _of_launches,
    "compiled": _of_compiled,
    "raw": _of_raw,
    "answers": lambda it: iter([(module, "kernel_target", _always(target)) for module, target in it.items()]),
    "launcher": lambda it: iter([(_launch(), "launcher_of", it)]),
    "driver": _of_driver,
    "pinned": _of_host_memory,
}


class Compiled(dict):  # type: ignore[type-arg]
    """Variants of a kernel, any of which is `entry`."""

    def __init__(self, entry: Any) -> None:
        super().__init__()
        self.entry = entry

    def get(self, key: Any, default: Any = None) -> Any:
        return self.entry


_BUILT = (torch.cuda, torch._C, torch.xpu)


class FakeGpu:
    """has: states facts, those before stay. gone: none of them is true any more."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def has(self, **facts: Any) -> FakeGpu:
        for fact, value in facts.items():
            for owner, name, stated in self._members(fact, value):
                # Members of a build with CUDA are not there in one without.
                self._stack.enter_context(mock.patch.object(owner, name, stated, create=owner in _BUILT))
        return self

    def replaces(self, owner: Any, **members: Any) -> None:
        """What of the package has no device to work on, such as recording and replaying a graph."""
        for name, value in members.items():
            self._stack.enter_context(mock.patch.object(owner, name, value))

    def _members(self, fact: str, value: Any) -> Members:
        if fact in _ANSWERS:
            return iter([(torch.cuda, _ANSWERS[fact], _always(value))])
        if fact in _ACTIONS:
            return iter([(torch.cuda, _ACTIONS[fact], value)])
        return _FACTS[fact](value)

    def gone(self) -> None:
        self._stack.close()


@contextlib.contextmanager
def fake_gpu(**facts: Any) -> Iterator[FakeGpu]:
    gpu = FakeGpu()
    try:
        yield gpu.has(**facts)
    finally:
        gpu.gone()
