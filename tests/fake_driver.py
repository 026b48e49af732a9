"""A driver without a GPU: launches of the compiled helper arrive in a list, or nowhere."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from sparse_bridge import native

_KINDS = dict.fromkeys(("alpha", "eps", "momentum"), "f")
_TYPE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    *[ctypes.c_uint] * 7,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)
# A function of C that takes what it is given and returns 0 for a kernel whose handle is 0.
NOWHERE: int = ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p).value or 0


class Launch(NamedTuple):
    """parameters: addresses of the parameters' memory, while the launch runs."""

    function: int
    grid: tuple[int, int, int]
    threads: int
    shared: int
    stream: int
    parameters: Any


class Driver:
    """A launch function that hands every launch to `seen`, whose result is the driver's code."""

    def __init__(self, seen: Any) -> None:
        def launch(function, gx, gy, gz, tx, ty, tz, shared, stream, parameters, extra):  # type: ignore[no-untyped-def]
            it = Launch(function or 0, (gx, gy, gz), tx, shared, stream or 0, parameters)
            return seen(it) or 0

        self._launch = _TYPE(launch)
        self.address: int = ctypes.cast(self._launch, ctypes.c_void_p).value or 0


def kinds_of_values(kernel: Any) -> str:
    """What one of our kernels takes, in the helper's letters; any whole number fits."""
    names = getattr(kernel.fn, "arg_names", None) or list(kernel.fn.signature.parameters)
    kinds = [
        "x" if name in kernel.constants else "P" if name.endswith("_ptr") else _KINDS.get(name, "l") for name in names
    ]
    return "".join(kinds)


def entry_of(kernel: Any) -> Any:
    """A compiled variant of one of our kernels whose launches go nowhere, as `launch.begin` takes
    it."""
    return native.module().Launcher(NOWHERE, 0, 128, 0, kinds_of_values(kernel)), (), ()
