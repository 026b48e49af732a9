"""Compiling and loading the helper."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from typing import Any

import filelock

from .. import folders
from ..refusals import Refusal, Why
from . import reads

NAME = "sparse_bridge_native"
SOURCE = pathlib.Path(__file__).with_name("native.c")
# The first includes the others.
PARTS = (SOURCE, *map(SOURCE.with_name, ("map_side.c", "training.c")))
FLAGS = ("-O2", "-std=c11", "-shared", "-fPIC", "-fno-strict-aliasing")
_LONGEST = 60.0  # seconds for the compiler, and for another process that compiles
_PYTHONS = (3, 10), (3, 14)  # whose C API the source was compiled against


def compiler() -> list[str] | None:
    """The command of a C compiler: `CC`, or what is installed; None where nothing is."""
    chosen = os.environ.get("CC", "").strip()
    if chosen:
        try:
            return shlex.split(chosen)
        except ValueError:  # quotes that do not end
            return [chosen]
    path = next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None)
    return None if path is None else [path]


def load() -> Any:
    """The helper as a module, compiled unless the cache folder has it. Raises Refusal."""
    unsupported = _unsupported()
    if unsupported is not None:
        raise unsupported
    try:
        return _loaded(_compiled())
    except (OSError, ImportError, subprocess.SubprocessError, filelock.Timeout) as error:
        raise Refusal(Why.HELPER_NOT_LOADED, type(error).__name__, error) from error


def problem() -> Refusal | None:
    """Why there can be no helper on this machine, as far as can be told without compiling."""
    headers = pathlib.Path(sysconfig.get_path("include"))
    if (unsupported := _unsupported()) is not None:
        return unsupported
    if compiler() is None:
        return Refusal(Why.HELPER_NO_COMPILER)
    if not (headers / "Python.h").exists():
        return Refusal(Why.HELPER_NO_HEADERS, headers)
    return None


def _unsupported() -> Refusal | None:
    """Why this Python does without."""
    if sys.implementation.name != "cpython" or os.name != "posix":
        return Refusal(Why.HELPER_PLATFORM, platform.platform())
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return Refusal(Why.HELPER_NO_LOCK)
    low, high = _PYTHONS
    if not low <= sys.version_info[:2] <= high:
        return Refusal(Why.HELPER_PYTHON, f"{low[0]}.{low[1]}", f"{high[0]}.{high[1]}")
    if sys.byteorder != "little":
        return Refusal(Why.HELPER_BYTE_ORDER)
    return None


def _compiled() -> pathlib.Path:
    """The shared library, which one process compiles and the others wait for.

    Its name ends in a digest of what is in it: the memory of a library that was cut short cannot be
    read, and a process dies of that.
    """
    headers, source = sysconfig.get_path("include"), digest()
    suffix, folder = importlib.machinery.EXTENSION_SUFFIXES[0], library_folder()
    if (library := _whole(folder, source, suffix)) is not None:
        return library
    missing, command = problem(), compiler()
    if missing is not None or command is None:
        raise missing or Refusal(Why.HELPER_NO_COMPILER)
    folder.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder / f"{source}.lock", timeout=_LONGEST):
        if (library := _whole(folder, source, suffix)) is None:
            library = _compile([*command, *FLAGS, f"-I{headers}"], folder, source, suffix)
    return library


def library_folder() -> pathlib.Path:
    """Where compiled libraries are kept."""
    return folders.cache() / "native"


def digest() -> str:
    """What a library is of: its sources and their header, one Python and one processor."""
    about = [*FLAGS, sysconfig.get_path("include"), sys.version, platform.machine()]
    sources = b"".join(part.read_bytes() for part in PARTS) + reads.header().encode()
    return hashlib.sha256(sources + "\0".join(about).encode()).hexdigest()[:24]


def stored() -> list[tuple[pathlib.Path, bool]]:
    """The libraries in the cache folder, and whether this Python would load them."""
    folder, mine = library_folder(), f"{NAME}-{digest()}-"
    return [(path, path.name.startswith(mine)) for path in sorted(folder.glob(f"{NAME}-*.so"))]


def _whole(folder: pathlib.Path, digest: str, suffix: str) -> pathlib.Path | None:
    """The library of a digest in the folder, if it is as it was made."""
    for path in sorted(folder.glob(f"{NAME}-{digest}-*{suffix}")):
        if path.name == _name(digest, path.read_bytes(), suffix):
            return path
    return None


def _name(digest: str, library: bytes, suffix: str) -> str:
    return f"{NAME}-{digest}-{hashlib.sha256(library).hexdigest()[:16]}{suffix}"


def _compile(command: list[str], folder: pathlib.Path, digest: str, suffix: str) -> pathlib.Path:
    with tempfile.TemporaryDirectory(dir=folder) as work:
        library = pathlib.Path(work) / NAME
        write_header(pathlib.Path(work))
        try:
            done = subprocess.run(
                [*command, f"-I{work}", str(SOURCE), "-o", str(library)],
                capture_output=True,
                text=True,
                timeout=_LONGEST,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Refusal(Why.HELPER_SLOW_COMPILER, command[0], _LONGEST) from None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise Refusal(Why.HELPER_NOT_COMPILED, command[0], done.returncode, last)
        path = folder / _name(digest, library.read_bytes(), suffix)
        os.replace(library, path)  # readers see all of it or nothing
        return path


def write_header(folder: pathlib.Path) -> None:
    """Write what the sources include beside Python's headers into a folder."""
    (folder / "reads.h").write_text(reads.header(), encoding="utf-8")


def _loaded(path: pathlib.Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
