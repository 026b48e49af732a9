"""Launchers of compiled kernels in the compiled helper: parameters are written and the driver is
called without Triton's launcher, whose signature changes from release to release.

What a kernel takes is said by its signature, where constants have the type "constexpr" (from Triton
3.3 on), and behind those come addresses of scratch memory, of which our kernels need none.
"""

from __future__ import annotations

import ctypes
import functools
import pathlib
import re
from collections.abc import Callable
from typing import Any

import torch

from ... import native

_LETTERS = {
    "constexpr": "x",
    "i1": "b",
    "i8": "b",
    "u1": "b",
    "u8": "b",
    "i16": "h",
    "u16": "h",
    "i32": "i",
    "u32": "i",
    "i64": "l",
    "u64": "l",
    "fp32": "f",
    "f32": "f",
    "fp64": "d",
}
# By Triton's name of a launcher: the driver's function, and its library.
_DRIVERS = {
    "CudaLauncher": ("cuLaunchKernel", "libcuda.so"),
    "HIPLauncher": ("hipModuleLaunchKernel", "libamdhip64.so"),
}


def letters_of(signature: dict[str, Any]) -> str | None:
    """The types of a kernel's arguments in letters, see `Launcher` in native.c; None where one has
    none."""
    letters = []
    for type_name in signature.values():
        letter = "P" if isinstance(type_name, str) and type_name[:1] == "*" else _LETTERS.get(type_name)
        if letter is None:
            return None
        letters.append(letter)
    return "".join(letters)


@functools.cache
def driver_of(launcher: str) -> tuple[int, Callable[[], None] | None] | None:
    """(the address of the function that launches, in the driver that this process has loaded; what
    gives a thread the context in which it launches, where that needs one)."""
    name, library = _DRIVERS[launcher]
    maps = pathlib.Path("/proc/self/maps")
    text = maps.read_text() if maps.exists() else ""
    match = re.search(rf"(/\S*{re.escape(library)}\S*)$", text, re.M)
    if match is None:
        return None
    driver = ctypes.CDLL(match.group(1))
    function = getattr(driver, name, None)
    if function is None:
        return None
    enter = functools.partial(enter_context, driver) if launcher == "CudaLauncher" else None
    return ctypes.cast(function, ctypes.c_void_p).value or 0, enter


def enter_context(driver: Any) -> None:
    """Give this thread the context of torch's current GPU, as torch's first own work in it would:
    CUDA's driver launches nothing in a thread without."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    driver.cuDeviceGet(ctypes.byref(device), torch._C._cuda_getDevice())
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    driver.cuCtxSetCurrent(context)


def native_launcher(compiled: Any, run: Any) -> Any:
    """What launches a compiled kernel, called with (grid x, y, z, stream, *values, *constants);
    None where Triton's own launcher has to."""
    name, metadata = type(run).__name__, compiled.metadata
    if name not in _DRIVERS or (helper := native.module()) is None:
        return None
    special = (
        getattr(metadata, "num_ctas", 1) != 1
        or getattr(metadata, "launch_cooperative_grid", False)
        or getattr(metadata, "launch_pdl", False)
        or getattr(metadata, "global_scratch_size", 0)
        or getattr(metadata, "profile_scratch_size", 0)
        or getattr(run, "gsan_enabled", False)
        # From there on CUDA wants an attribute of the launch.
        or metadata.shared > 228 << 10
    )
    letters, driver = letters_of(compiled.src.signature), driver_of(name)
    if special or letters is None or driver is None:
        return None
    threads = metadata.num_warps * getattr(metadata, "warp_size", 32)
    address, enter = driver
    return helper.Launcher(address, compiled.function, threads, metadata.shared, letters, enter)
