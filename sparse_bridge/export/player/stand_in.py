"""A driver of Triton for a GPU that is not there: kernels are compiled for it, and launches are heard."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from ...kernels.runtime.target import Target

COMPUTE_UNITS = 64  # of a GPU of which no more is known than its architecture
_SHARED = 1 << 20  # Triton refuses what takes more; tiles are chosen by the target's own limit


class Compiled:
    """name, code and metadata of a kernel, one object for all its launches."""

    def __init__(self, metadata: Any) -> None:
        self.metadata, self.name, self.code = metadata, "", b""


class Listener(Protocol):
    """Who hears of launches."""

    def launched(self, compiled: Compiled, grid: tuple[int, int, int], args: list[tuple[str, Any]]) -> None:
        """A launch of a compiled kernel. args: (type, value) of what it takes, as its signature says."""


class _Utils:
    """What Triton asks of a driver's library."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def load_binary(self, name: str, code: bytes, shared: int, device: str) -> tuple[Any, ...]:
        return (name,), (name, code), 0, 0, 1024

    def unload_module(self, module: Any) -> None:
        """There is nothing to unload."""

    def get_device_properties(self, device: str = "") -> dict[str, Any]:
        return {
            "max_shared_mem": _SHARED,
            "max_num_regs": 65536,
            "multiprocessor_count": COMPUTE_UNITS,
            "sm_clock_rate": 1,
            "mem_clock_rate": 1,
            "mem_bus_width": 1,
            "warpSize": self.target.warp_size,
        }


class _Driver:
    """What `triton.runtime.driver.active` needs."""

    def __init__(self, target: Target) -> None:
        self.target, self.utils = target, _Utils(target)
        # Triton keeps compiled kernels, launcher included, by this: no number, which another driver could have.
        self.device = f"stand-in for {target.arch}"
        self.listener: Listener | None = None
        driver = self

        class Launcher:
            """Triton's launcher of one compiled kernel, which Triton keeps: it asks who listens now."""

            def __init__(self, src: Any, metadata: Any) -> None:
                self.types, self.compiled = list(dict(src.signature).values()), Compiled(metadata)

            def __call__(self, gx: int, gy: int, gz: int, stream: int, function: Any, *rest: Any) -> None:
                # Behind the function: packed metadata, metadata of the launch, two hooks.
                self.compiled.name, self.compiled.code = function
                listener = _listeners.get(driver.target.arch)
                if listener is not None and gx * gy * gz > 0:
                    values = list(zip(self.types, rest[4:], strict=False))
                    args = [(kind, value) for kind, value in values if kind != "constexpr"]
                    listener.launched(self.compiled, (gx, gy, gz), args)

        self.launcher_cls = Launcher

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        target = self.target
        return GPUTarget(target.backend, target.capability or target.arch, target.warp_size)

    def get_current_device(self) -> str:
        return self.device

    def set_current_device(self, device: str) -> None:
        """There is one."""

    def get_current_stream(self, device: str | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind

    def is_active(self) -> bool:
        return True


_listeners: dict[str, Listener] = {}


@contextlib.contextmanager
def driving(target: Target, listener: Listener) -> Iterator[None]:
    """Triton compiles launches over CPU tensors for `target`, and `listener` hears of them; nothing runs."""
    from triton.runtime import driver

    before = dict(vars(driver))
    driver.set_active(_Driver(target))
    _listeners[target.arch] = listener
    try:
        yield
    finally:
        del _listeners[target.arch]
        vars(driver).update(before)  # other names up to Triton 3.4
