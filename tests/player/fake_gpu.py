"""The drivers of `fake_driver.c`, and what a GPU would do with their launches: list them, or execute the
code of a gfx942 on the emulator."""

from __future__ import annotations

import ctypes
import pathlib
import struct
import subprocess
from typing import Any, NamedTuple

from sparse_bridge.export.player.package_file import ADDRESS, LAUNCH
from sparse_bridge.native.build import compiler

SOURCE = pathlib.Path(__file__).with_name("fake_driver.c")
MACHINES = {"gfx942": 0x4C, "gfx90a": 0x3F, "gfx1100": 0x41, "gfx1201": 0x4E}
_LAUNCH = ctypes.CFUNCTYPE(
    None,
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.c_uint,
    ctypes.c_uint,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
)
_COPY = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
_SONAMES = {"cuda": "libcuda.so.1", "hip": "libamdhip64.so"}


class Launch(NamedTuple):
    """parameters: addresses of the values, while the launch runs."""

    image: int
    name: str
    grid: tuple[int, int, int]
    threads: int
    shared: int
    parameters: Any


def built(backend: str, folder: pathlib.Path, *flags: str) -> pathlib.Path:
    """The driver as a library under the name that the player opens."""
    path = folder / _SONAMES[backend]
    command = [*(compiler() or ["cc"]), "-std=gnu99", "-O1", "-shared", "-fPIC", *flags, str(SOURCE)]
    command += ["-DFAKE_HIP"] if backend == "hip" else []
    subprocess.run([*command, f"-Wl,-soname,{_SONAMES[backend]}", "-o", str(path)], check=True)
    return path


class FakeGpu:
    """A driver that is loaded, so that the player finds it by its name."""

    def __init__(self, backend: str, folder: pathlib.Path, *flags: str) -> None:
        self.library = ctypes.CDLL(str(built(backend, folder, *flags)))
        self.library.fake_alive.restype = ctypes.c_long
        self._kept: Any = None
        self.error: BaseException | None = None
        self.listening: Any = None

    def listen(self, on_launch: Any = None, on_copy: Any = None) -> None:
        """Hand launches and copies to these; what they raise is kept in `error`."""

        def launched(image, name, grid, threads, shared, stream, parameters):
            if self.error is None:
                try:
                    on_launch(Launch(image, name.decode(), tuple(grid[:3]), threads, shared, parameters))
                except BaseException as error:  # ctypes would print it and go on
                    self.error = error

        self.error, self.listening = None, on_launch
        self._kept = (_LAUNCH(launched) if on_launch else _LAUNCH(), _COPY(on_copy) if on_copy else _COPY())
        self.library.fake_listen(*self._kept)

    def device(self, count: int = 1, capability: int = 87, arch: str = "gfx942") -> None:
        self.library.fake_device(count, capability, MACHINES[arch])

    def fail(self, call: str, after: int = 0, code: int = 999) -> None:
        self.library.fake_fail(call.encode(), ctypes.c_long(after), code)

    @property
    def alive(self) -> int:
        return self.library.fake_alive()


def _size_of(image: int) -> int:
    """Bytes of a 64-bit ELF whose section headers come last, or its segments."""
    header = ctypes.string_at(image, 64)
    (at,), (size, count) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<2H", header, 58)
    return at + size * count


class Emulator:
    """Executes launches of gfx942's code as they come; they may reach the package's block of memory alone.

    block: its address, where it is known: then a step is told from one that copies with the same distance elsewhere.
    accesses: what each step may read, besides constants, and write, as `dependencies` has it; without it, all."""

    def __init__(self, program: Any, arch: str = "gfx942", block: int | None = None, accesses: Any = None) -> None:
        import amd_emulator.launch as launch

        self._make, self._arch, self._program = launch.Kernel, arch, program
        self._steps = [step for step in program.steps if step.kind == LAUNCH]
        self._built: dict[Any, Any] = {}
        self._block = block
        self._accesses = None if accesses is None else dict(zip(map(id, program.steps), accesses, strict=True))
        self.launches = 0

    def __call__(self, it: Launch) -> None:
        code = ctypes.string_at(it.image, _size_of(it.image))
        step, values, block = self._step_of(it, code)
        if step.kernel not in self._built:
            wave = 64
            self._built[step.kernel] = self._make(code, it.name, self._arch, it.shared, it.threads // wave)
        if self._accesses is None:
            self._built[step.kernel].launch(it.grid, values, [(block, block + self._program.block)])
        else:
            self._within(
                self._accesses[id(step)], block, lambda own: self._built[step.kernel].launch(it.grid, values, own)
            )
        self.launches += 1

    def _within(self, accesses: Any, block: int, launch: Any) -> None:
        """Raises AssertionError where a launch changes what it does not say; the emulator, where it reads that."""
        reached = [(block + own.start, block + own.stop) for own in accesses]
        reached += [(block + own.at, block + own.at + len(own.data)) for own in self._program.constants]
        before = bytearray(ctypes.string_at(block, self._program.block))
        launch(reached)
        after = bytearray(ctypes.string_at(block, self._program.block))
        for own in accesses:
            if own.writes:
                before[own.start : own.stop] = after[own.start : own.stop]
        assert before == after, accesses

    def _step_of(self, it: Launch, code: bytes) -> tuple[Any, list[tuple[str, int]], int]:
        """(the step that is launched, its arguments, the address of the block). Steps of a graph come in any order."""
        for step in self._steps:
            kernel = self._program.kernels[step.kernel]
            if (it.name, it.grid, code) != (kernel.name, step.grid, kernel.code):
                continue
            values = [
                int.from_bytes(ctypes.string_at(it.parameters[place], arg.size), "little")
                for place, arg in enumerate(step.args)
            ]
            pairs = list(zip(values, step.args, strict=True))
            blocks = {value - arg.value for value, arg in pairs if arg.kind == ADDRESS}
            if self._block not in (None, *blocks):
                continue
            if len(blocks) == 1 and all(value == arg.value for value, arg in pairs if arg.kind != ADDRESS):
                return step, [(f"u{8 * arg.size}", value) for value, arg in pairs], blocks.pop()
        raise AssertionError(f"no step launches {it.name} so")
