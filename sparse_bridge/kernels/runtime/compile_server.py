"""The compile server: a process that forks worker processes, which fill Triton's disk cache.

It runs beside one program, which starts it (`compile_processes`). It imports Triton and the kernels
and hashes Triton's files once; workers share that memory. None of them imports torch or touches a
GPU: a form is compiled for the target that the program names.

The ranks of a training ask for the same forms at the same time, each its own server. Of these
workers one compiles a form; the others wait for it and find the result on disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import pathlib
import pickle
import pkgutil
import sys
import types
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

IDLE = 60.0  # seconds after which a worker without work ends
_TURN = 40.0  # seconds to wait for another program's worker; the own program waits a little longer


class _Absent:
    """Whatever a kernel module takes from torch when it is imported."""

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> _Absent:
        return self

    def __getitem__(self, _: Any) -> _Absent:
        return self

    def __or__(self, _: Any) -> _Absent:  # in types
        return self

    __ror__ = __or__


def main(descriptors: Sequence[str]) -> None:
    """Serve each of these pipes, by file descriptor, from a worker of its own; return when all have
    ended."""
    _import_kernels()
    pipes, workers = list(map(int, descriptors)), set()
    for pipe in pipes:
        worker = os.fork()
        if not worker:
            _work(pipe, [other for other in pipes if other != pipe])
        workers.add(worker)
    for pipe in pipes:
        os.close(pipe)
    while workers:
        workers.discard(os.wait()[0])


def _import_kernels() -> None:
    """All that workers have in common."""
    # Launchers use torch, jit functions do not. Importing it takes a second and 200 MB.
    sys.modules["torch"] = absent = types.ModuleType("torch")
    absent.__getattr__ = _Absent().__getattr__  # type: ignore[method-assign]
    from sparse_bridge import kernels

    for module in pkgutil.walk_packages(kernels.__path__, kernels.__name__ + "."):
        importlib.import_module(module.name)
    from sparse_bridge.kernels.runtime import launch, triton_compat

    triton_compat.hash_files()
    triton_compat.load_no_launchers()
    for kernel in launch.REGISTRY.values():
        triton_compat.settle_key(kernel.fn)


def _work(pipe: int, others: Sequence[int]) -> None:
    """The life of a worker."""
    try:
        for other in others:
            os.close(other)
        with contextlib.suppress(EOFError, OSError):  # the program has ended
            _answer(Connection(pipe))
    finally:
        os._exit(0)


def _answer(pipe: Connection) -> None:
    """Say that the worker is ready, then compile form after form; an answer is the error, or
    nothing."""
    pipe.send_bytes(b"")
    while pipe.poll(IDLE):
        form = pipe.recv_bytes()
        try:
            _compile(*pickle.loads(form))
            error = ""
        # The program compiles it again, and raises.
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        pipe.send_bytes(error.encode())


def _compile(
    environment: dict[str, str], function: tuple[str, str], fields: dict[str, Any], target: Any, options: dict[str, Any]
) -> None:
    """Compile a form and its launcher.

    environment: the program's, which switches parts of the compiler.  function: module and name of the
    jit function.  fields: of Triton's `ASTSource`.
    """
    from sparse_bridge.kernels.runtime import triton_compat

    if environment != dict(os.environ):
        os.environ.clear()
        os.environ.update(environment)
    fn = getattr(importlib.import_module(function[0]), function[1])
    src = triton_compat.source_of(fn, fields)
    form = src.hash(), str(target), str(sorted(options.items())), str(triton_compat.triton_cache())
    # The user's own folder: in one of all users others could lay links.
    folder = triton_compat.triton_cache() / triton_compat.LOCKS
    with _in_turn(folder / f"{hashlib.sha256(chr(10).join(form).encode()).hexdigest()[:16]}.lock"):
        triton_compat.fill_disk_cache(src, target, options)


@contextlib.contextmanager
def _in_turn(path: pathlib.Path) -> Iterator[None]:
    """Inside, no other worker of this machine and user compiles the form whose lock this is. Where
    files cannot be locked, or another takes too long, all go on."""
    import filelock

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, NotImplementedError, filelock.Timeout):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(path)  # of a killed worker it is free
            stack.enter_context(lock.acquire(timeout=_TURN, poll_interval=0.02))
        yield
