"""C code: compiled on first use, kept on disk by content.

Forms (see `forms`) are compiled in batches: `link` resolves the functions of all entries made since
its last call.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import pathlib
import platform
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

from .structures import NATIVE, EmulatorError, Entry, stats

_HERE = pathlib.Path(__file__).resolve().parent
_FLAGS = [
    "-O2",
    "-ftree-vectorize",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fwrapv",
    "-fno-strict-aliasing",
    "-w",
    "-shared",
    "-fPIC",
]
_CC = os.environ.get("CC", "cc")

# symbol -> source; symbol -> address; symbol -> entries that wait for it; symbol -> shared object
_source: dict[str, str] = {}
_address: dict[str, int] = {}
_pending: dict[str, list[Entry]] = {}
_index: dict[str, str] = {}
_symbols: dict[object, str] = {}


def cache_dir() -> pathlib.Path:
    """Where compiled code lies; it can be deleted at any time."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    named = os.environ.get("AMD_EMULATOR_CACHE")
    folder = pathlib.Path(named or f"{base}/amd_emulator").expanduser()
    folder.mkdir(0o700, parents=True, exist_ok=True)
    return folder


@functools.cache
def _host() -> str:
    """A hash of what compiled code depends on besides its source: compiler, CPU (-march=native),
    flags and the shared header."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        cpu = platform.processor() + platform.machine()
    version = subprocess.check_output([*_CC.split(), "--version"], text=True)
    header = (_HERE / "alu.h").read_text()
    return hashlib.sha256("\0".join([version, cpu, *_FLAGS, header]).encode()).hexdigest()


def _compile(source: str, name: str, extra: tuple[str, ...] = ()) -> str:
    """Source text -> path of a shared object in the cache."""
    digest = hashlib.sha256((_host() + source).encode()).hexdigest()[:20]
    shared = str(cache_dir() / f"{name}_{digest}.so")
    if not os.path.exists(shared):
        fresh = f"{shared}.{os.getpid()}"
        command = [*_CC.split(), *_FLAGS, *extra, "-I", str(_HERE), "-x", "c", "-o", fresh, "-", "-lm"]
        done = subprocess.run(command, input=source, text=True, capture_output=True)
        if done.returncode:
            raise EmulatorError(f"{_CC} failed: {done.stderr[:2000]}")
        os.replace(fresh, shared)
    return shared


@functools.cache
def _load(shared: str) -> ctypes.CDLL:
    return ctypes.CDLL(shared)


@functools.cache
def core() -> ctypes.CDLL:
    """The native core."""
    loaded = _load(_compile((_HERE / "core.c").read_text(), "core", ("-O3",)))
    loaded.run.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_uint64] * 3
    return loaded


@functools.cache
def function(name: str) -> int:
    """Address of one of the core's functions."""
    return ctypes.cast(getattr(core(), name), ctypes.c_void_p).value


def emit(key, make) -> str:
    """The symbol of a form; `make` writes the body of its C function the first time."""
    symbol = _symbols.get(key)
    if symbol is None:
        body = make()
        symbol = "f_" + hashlib.sha256((_host() + body).encode()).hexdigest()[:20]
        _symbols[key] = symbol
        _source[symbol] = f"int {symbol}(E *e, W *w) {{ {body} return 0; }}"
    return symbol


def entry_for(symbol: str, size: int) -> Entry:
    """An entry of a form; its function may come with the next `link`."""
    entry = Entry(kind=NATIVE, size=size)
    if symbol in _address:
        entry.fn = _address[symbol]
    else:
        _pending.setdefault(symbol, []).append(entry)
    return entry


def _index_file() -> pathlib.Path:
    return cache_dir() / f"forms_{_host()[:16]}.idx"


def _read_index() -> None:
    if not _index_file().exists():
        return
    for line in _index_file().read_text().splitlines():
        words = line.split()
        if len(words) == 2 and (cache_dir() / words[1]).exists():
            _index[words[0]] = str(cache_dir() / words[1])


def _compile_forms(symbols: list[str]) -> None:
    begin = time.time()
    n = max(1, min(os.cpu_count() or 1, 8, len(symbols) // 6 or 1))
    parts = [symbols[i::n] for i in range(n)]
    texts = ['#include "alu.h"\n' + "\n".join(_source[s] for s in part) for part in parts]
    with ThreadPoolExecutor(n) as pool:
        made = list(pool.map(lambda text: _compile(text, "forms"), texts))
    with open(_index_file(), "a") as index:
        for part, shared in zip(parts, made, strict=True):
            index.write("".join(f"{s} {os.path.basename(shared)}\n" for s in part))
            _index.update(dict.fromkeys(part, shared))
    stats.compiled += len(symbols)
    stats.compile_seconds += time.time() - begin


def link() -> None:
    """Give the entries that wait their functions: from the cache, or compiled together."""
    if not _pending:
        return
    wanted = [symbol for symbol in _pending if symbol not in _address]
    if any(symbol not in _index for symbol in wanted):
        _read_index()
    missing = [symbol for symbol in wanted if symbol not in _index]
    if missing:
        _compile_forms(missing)
    for symbol in wanted:
        found = getattr(_load(_index[symbol]), symbol)
        _address[symbol] = ctypes.cast(found, ctypes.c_void_p).value
    for symbol, entries in _pending.items():
        for entry in entries:
            entry.fn = _address[symbol]
    _pending.clear()
