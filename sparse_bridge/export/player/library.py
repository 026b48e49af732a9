"""The player in C, compiled and called from Python: the same code that programs without Python use."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import pathlib
import platform
import subprocess
import tempfile
from typing import Any

import torch

from ... import folders
from ...errors import UnsupportedError
from ...native.build import compiler
from ..plugin_checks import ExportError
from .package_file import DTYPES, MOST_DIMS

SOURCES = pathlib.Path(__file__).with_name("native")
FLAGS = ("-std=c99", "-O2", "-shared", "-fPIC")
_LONGEST = 120.0  # seconds for the compiler
HOST, DEVICE = range(2)
_DTYPES = {number: dtype for dtype, number in DTYPES.items()}


class Error(ctypes.Structure):
    """`sbrt_error`."""

    _fields_ = [("code", ctypes.c_int), ("text", ctypes.c_char * 300)]


class TensorInfo(ctypes.Structure):
    """`sbrt_tensor`."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("dtype", ctypes.c_int),
        ("level", ctypes.c_int),
        ("n_dims", ctypes.c_int),
        ("dims", ctypes.c_int64 * MOST_DIMS),
        ("rows", ctypes.c_int64),
        ("data", ctypes.c_void_p),
    ]

    @property
    def type(self) -> torch.dtype:
        """Of its values."""
        return _DTYPES[self.dtype]

    def shape(self) -> tuple[int, ...]:
        """Of the rows in use after a run."""
        sizes = tuple(self.dims[: self.n_dims])
        return sizes if self.level < 0 else (max(0, self.rows), *sizes[1:])


class ProgramInfo(ctypes.Structure):
    """`sbrt_program`."""

    _fields_ = [
        ("target", ctypes.c_char_p),
        ("rows", ctypes.c_int64),
        ("memory", ctypes.c_int64),
        ("block", ctypes.c_int64),
        *[(name, ctypes.c_int) for name in ("n_steps", "n_kernels", "n_inputs", "n_outputs")],
    ]


class PlayerError(ExportError):
    """What the player refused. code: of sparse_bridge_rt.h."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def library_folder() -> pathlib.Path:
    """Where compiled players are kept."""
    return folders.cache() / "player"


@functools.cache
def library() -> Any:
    """The compiled player. Raises: UnsupportedError without a C compiler or a place for it, or where it fails."""
    source, header = SOURCES / "sparse_bridge_rt.c", SOURCES / "sparse_bridge_rt.h"
    content = source.read_bytes() + header.read_bytes() + " ".join((*FLAGS, platform.machine())).encode()
    folder = library_folder()
    path = folder / f"sparse_bridge_rt-{hashlib.sha256(content).hexdigest()[:24]}.so"
    if not path.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _compile(source, path)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UnsupportedError(
                f"the player cannot be built in {folder}: {error}. Set CC to a C compiler and SPARSE_BRIDGE_CACHE_DIR "
                "to a folder that may be written."
            ) from error
    return _typed(ctypes.CDLL(str(path)))


def _compile(source: pathlib.Path, path: pathlib.Path) -> None:
    command = compiler()
    if command is None:
        raise UnsupportedError("there is no C compiler to build the player; install gcc or clang, or set CC.")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        work = pathlib.Path(folder) / "player.so"
        words = [*command, *FLAGS, str(source), "-ldl", "-o", str(work)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=_LONGEST, check=False)
        if done.returncode:
            raise UnsupportedError(f"{command[0]} does not compile the player: {done.stderr.strip()[-400:]}")
        os.replace(work, path)  # others see all of it or nothing


def _typed(loaded: Any) -> Any:
    pointer, error = ctypes.c_void_p, ctypes.POINTER(Error)
    number = ctypes.c_int
    signatures = {
        "load_file": (ctypes.c_char_p, ctypes.POINTER(pointer), error),
        "load_memory": (ctypes.c_char_p, ctypes.c_size_t, ctypes.POINTER(pointer), error),
        "info": (pointer, number, ctypes.POINTER(ProgramInfo), error),
        "create": (pointer, number, pointer, ctypes.c_int64, ctypes.POINTER(pointer), error),
        "playing": (pointer, ctypes.POINTER(ProgramInfo), error),
        "capture": (pointer, error),
        "run": (pointer, number, pointer, pointer, ctypes.c_int64, error),
        "input": (pointer, number, ctypes.POINTER(TensorInfo), error),
        "output": (pointer, number, ctypes.POINTER(TensorInfo), error),
        "read": (pointer, number, pointer, ctypes.c_size_t, error),
        "count": (pointer,),
    }
    for name, types in signatures.items():
        getattr(loaded, f"sbrt_{name}").argtypes = types
    for name in ("unload", "destroy"):
        function = getattr(loaded, f"sbrt_{name}")
        function.argtypes, function.restype = (pointer,), None
    return loaded


def call(name: str, *args: Any) -> None:
    """Call a function of the player. Raises: PlayerError with its sentence."""
    error = Error()
    if getattr(library(), f"sbrt_{name}")(*args, ctypes.byref(error)):
        raise PlayerError(error.text.decode(errors="replace"), error.code)


class Package:
    """A package on a GPU, played by the same C code as without Python. It serves one thread at a time.

    package = load_package("model.sbp")
    outputs = package(coords, features)

    memory: bytes that it takes on the GPU at most, beside what the driver takes for any program.
    """

    def __init__(self, path: str | os.PathLike[str], *, device: int = 0, rows: int = 0, graph: bool = True) -> None:
        """device: number of the GPU.  rows: of an input at most; 0: as many as the package was made for.  graph:
        launch all steps as one graph, which is faster; False: one by one.

        Raises: PlayerError where the file is damaged or holds nothing for the GPU, or memory is short; ExportError for
        a device or rows that are no whole numbers, and a graph that is no bool.
        """
        if type(graph) is not bool:
            raise ExportError(f"load_package: graph is {graph!r}; pass True for one graph, False for step by step.")
        for name, value in (("device", device), ("rows", rows)):
            if type(value) is not int or abs(value) >= 1 << 31:  # the player judges others
                wanted = "the number of a GPU, 0 for the first" if name == "device" else "a number of rows, 0 for all"
                raise ExportError(f"load_package: {name} is {value!r}; pass {wanted}.")
        self._model, self._instance = ctypes.c_void_p(), ctypes.c_void_p()
        call("load_file", os.fsencode(path), ctypes.byref(self._model))
        call("create", self._model, device, None, rows, ctypes.byref(self._instance))
        if graph:
            call("capture", self._instance)
        program = ProgramInfo()
        call("playing", self._instance, ctypes.byref(program))
        self._n_outputs, self.memory = program.n_outputs, int(program.memory)
        coords, features = self._inputs()
        self._coords, self._features = coords.shape()[1:], (features.type, features.shape()[1:])

    def _inputs(self) -> tuple[TensorInfo, TensorInfo]:
        tensors = TensorInfo(), TensorInfo()
        for index, tensor in enumerate(tensors):
            call("input", self._instance, index, ctypes.byref(tensor))
        return tensors

    def __call__(self, coords: torch.Tensor, features: torch.Tensor) -> list[torch.Tensor]:
        """The outputs of the model, on the host.

        coords: int32 [N, 1 + D], distinct and inside of the grid; features: [N, C]; both on the host or both on
            the GPU, in which case the current stream is waited for.
        Raises: PlayerError for what the model does not take; ExportError for other tensors, and once it is closed.
        """
        if not self._instance:
            raise ExportError("the package was closed; load it again.")
        dtype, channels = self._features
        wanted = (torch.int32, 2, self._coords), (dtype, 2, channels)
        given = [(own.dtype, own.ndim, own.shape[1:]) if _is_plain(own) else None for own in (coords, features)]
        if given != list(wanted) or coords.device != features.device or len(coords) != len(features):
            raise ExportError(
                f"coordinates {_described(coords)} and features {_described(features)}; expected torch.int32 "
                f"[N, {self._coords[0]}] and {dtype} [N, {channels[0]}] on the host, or both on one GPU."
            )
        coords, features = coords.contiguous(), features.detach().contiguous()
        if coords.device.type != "cpu":
            torch.cuda.current_stream(coords.device).synchronize()
        where = HOST if coords.device.type == "cpu" else DEVICE
        call("run", self._instance, where, coords.data_ptr(), features.data_ptr(), len(coords))
        return [self._output(index) for index in range(self._n_outputs)]

    def _output(self, index: int) -> torch.Tensor:
        info = TensorInfo()
        call("output", self._instance, index, ctypes.byref(info))
        result = torch.empty(info.shape(), dtype=info.type)
        if result.numel():
            call("read", self._instance, index, result.data_ptr(), result.numel() * result.itemsize)
        return result

    def close(self) -> None:
        """Give the GPU's memory back; nothing can be played afterwards."""
        instance, model = self._instance, self._model
        self._instance, self._model = ctypes.c_void_p(), ctypes.c_void_p()
        library().sbrt_destroy(instance)
        library().sbrt_unload(model)

    def __del__(self) -> None:
        if getattr(self, "_model", None):
            self.close()


def _is_plain(value: Any) -> bool:
    """Whether a tensor has memory of the host or of a GPU, one element beside the other."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type in ("cpu", "cuda")


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    where = "" if _is_plain(value) else f" ({value.device}, {value.layout})"
    return f"{value.dtype} {list(value.shape)}{where}"


def targets_of(path: str | os.PathLike[str]) -> dict[str, int]:
    """The targets of a package, which is checked, and the bytes that each takes on the GPU at most. Raises:
    PlayerError."""
    model, program = ctypes.c_void_p(), ProgramInfo()
    call("load_file", os.fsencode(path), ctypes.byref(model))
    try:
        targets = {}
        for index in range(library().sbrt_count(model)):
            call("info", model, index, ctypes.byref(program))
            targets[program.target.decode()] = int(program.memory)
        return targets
    finally:
        library().sbrt_unload(model)
