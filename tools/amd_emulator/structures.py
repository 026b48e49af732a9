"""What Python and the native core share, and the emulator's errors."""

from __future__ import annotations

import ctypes
import types

stats = types.SimpleNamespace(steps=0, seconds=0.0, compiled=0, compile_seconds=0.0, launches=0)


class EmulatorError(RuntimeError):
    """The emulated kernel cannot go on."""


class MemoryFault(EmulatorError):
    """An access outside the memory that a launch was given."""


class Unsupported(EmulatorError):
    """An instruction or a modifier that is not emulated."""


class State(ctypes.Structure):
    """One wave (struct W of alu.h)."""

    _fields_ = (
        [(n, ctypes.c_uint64) for n in ("s", "v", "acc", "lds", "scr")]
        + [(n, ctypes.c_uint32) for n in ("lds_size", "scr_stride", "wave", "mxcsr")]
        + [
            ("nrange", ctypes.c_uint64),
            ("range", ctypes.c_uint64),
            ("err_addr", ctypes.c_uint64),
            ("err_lane", ctypes.c_int32),
            ("err_bytes", ctypes.c_int32),
            ("steps", ctypes.c_uint64),
            ("mex", ctypes.c_uint64),
            ("ieee", ctypes.c_uint32),
            ("pad", ctypes.c_uint32),
            ("m", ctypes.c_uint32 * 64),
        ]
    )


class Entry(ctypes.Structure):
    """One decoded instruction (struct E of alu.h)."""

    _fields_ = (
        [("fn", ctypes.c_uint64)]
        + [(n, ctypes.c_int32) for n in ("kind", "size", "stop", "pad")]
        + [("a", ctypes.c_int32 * 32), ("c", ctypes.c_uint64 * 8), ("sub", ctypes.c_uint64)]
    )


NATIVE, DPP, END, NOP, SDWA = range(5)  # kinds of entries
