"""Compiling in worker processes, from the program's side.

A compilation holds the interpreter lock for a third of its time, so threads of one process hardly
compile side by side. Worker processes fill Triton's disk cache instead; the program's thread waits
without the lock and then loads the form. What a worker cannot do is compiled by the thread, so that
errors are raised where they always were.

The first form of a dry run that the disk cache does not have starts the processes.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from typing import Any

from ... import log, policy, state
from ...workers import cores
from .triton_compat import bind_to_device, settle_key

enabled = True  # False: threads compile
_MOST = 16  # forms that are compiled side by side
_PATIENCE = 5.0  # seconds from its start in which forms wait for the server
_LONGEST = 60.0  # seconds that a form may take in a worker

_PACKAGE = __name__.partition(".")[0]
_ROOT = str(pathlib.Path(__file__).resolve().parents[3])
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[1].split(':'); "
    f"from {__package__} import compile_server; compile_server.main(sys.argv[2:])"
)


def side_by_side() -> int:
    """How many forms to compile at once. Each of a machine's ranks has as many workers, most of
    which wait for one another's results: every form is compiled once."""
    return max(1, min(_MOST, cores()))


class _Worker:
    """A worker process, by its pipe. It has ended where a method raises EOFError or OSError."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self._greeted = pipe, False

    def accepts(self, seconds: float) -> bool:
        """Whether it takes forms, within so many seconds."""
        if not self._greeted and self.pipe.poll(max(0.0, seconds)):
            self.pipe.recv_bytes()
            self._greeted = True
        if self._greeted and self.pipe.poll():
            raise EOFError  # nobody has asked it
        return self._greeted

    def compile(self, form: bytes) -> str:
        """The error, or nothing."""
        self.pipe.send_bytes(form)
        if not self.pipe.poll(_LONGEST):
            raise EOFError
        return self.pipe.recv_bytes().decode()


class Processes:
    """The compile server of this program and its workers.  compiled: forms, by workers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._crew: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._starts, self._in_vain, self.compiled = policy.Attempts(policy.SERVER_STARTS), 0, 0
        self._started, self._pid = 0.0, os.getpid()

    def reset(self) -> None:
        """Let the workers end, and begin anew."""
        with self._lock:
            self._forget()

    def start(self) -> None:
        """Start the compile server where there is none."""
        # A fork of the program shares its pipes, and perhaps a lock that is taken for ever.
        if self._pid != os.getpid() or not enabled or not _possible():
            return
        with self._lock:
            if not self._crew and not self._starts.over and not self.useless:
                self._starts.failed()  # until it serves
                try:
                    self._start()
                # No right to start processes, no memory, no file descriptors.
                except (OSError, subprocess.SubprocessError) as error:
                    log.logger.debug("no compile server: %s", error)

    def _start(self) -> None:
        pipes = [Pipe() for _ in range(side_by_side() + 1)]  # one for a launch that waits
        theirs = [pipe.fileno() for _, pipe in pipes]
        path = ":".join(map(str, [*sys.path, _ROOT]))
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, path, *map(str, theirs)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=theirs,
            start_new_session=True,  # Ctrl-C is for the program
        )
        for _, pipe in pipes:
            pipe.close()
        self._idle = [_Worker(pipe) for pipe, _ in pipes]
        self._crew, self._started = set(self._idle), time.monotonic()
        threading.Thread(  # or it stays behind as a zombie
            target=process.wait, name="sparse_bridge-compile-server", daemon=True
        ).start()

    def compile(self, form: bytes, start: bool) -> bool:
        """Whether a worker has compiled a form.

        start: the processes where there are none, and wait for them; else a worker has to be ready.
        """
        worker = self._take(start)
        if worker is None:
            return False
        try:
            error = worker.compile(form)
        except (EOFError, OSError):
            error = "it has ended"
            with self._lock:
                self._crew.discard(worker)
        self._give_back(worker)
        with self._lock:
            self.compiled += not error
        if error:
            log.logger.debug("a worker process did not compile a form: %s", error)
        return not error

    def _take(self, start: bool) -> _Worker | None:
        for _ in range(policy.SERVER_STARTS.failures):
            if start:
                self.start()
            if self._pid != os.getpid():
                return None
            with self._lock:
                if not self._idle or not enabled or self.useless:
                    return None
                worker = self._idle.pop()
                remaining = self._started + _PATIENCE - time.monotonic() if start else 0.0
            try:
                accepted = worker.accepts(remaining)
            except (EOFError, OSError):  # the server has failed, or had nothing to do for long
                with self._lock:
                    if worker in self._crew:
                        self._crew, self._idle = set(), []
                continue
            if accepted:
                self._starts.learn(True)
                return worker
            self._give_back(worker)
            return None
        return None

    def _give_back(self, worker: _Worker) -> None:
        with self._lock:
            if worker in self._crew:
                self._idle.append(worker)

    def in_vain(self, kernel: str) -> None:
        """The disk cache does not have what a worker has compiled: it fills another one, or Triton
        keeps none."""
        with self._lock:
            self._in_vain += 1
        log.logger.debug(
            "a form of %s that a worker process has compiled is not in the disk cache (%d of %d)",
            kernel,
            self._in_vain,
            self.compiled,
        )

    @property
    def useless(self) -> bool:
        """Whether most of what workers compile is not found."""
        return self._in_vain >= policy.FORMS_IN_VAIN and 2 * self._in_vain > self.compiled


def _possible() -> bool:
    """Whether this interpreter can start another one, which forks."""
    name = os.path.basename(sys.executable or "")
    return hasattr(os, "fork") and "python" in name and not getattr(sys, "frozen", False)


_processes = Processes()
_local = threading.local()
_binding = threading.Lock()
start = _processes.start


def compiled() -> int:
    """Forms that worker processes have compiled for this program."""
    return _processes.compiled


@state.owns
def reset() -> None:
    """Let the worker processes end, and ask them again."""
    _processes.reset()


@contextlib.contextmanager
def worker_first(fn: Any, begin: bool = False) -> Iterator[None]:
    """Inside, what this thread compiles of a jit function is compiled by a worker process if the
    disk cache does not have it.

    begin: start the processes; else they are asked where there are some.
    """
    with _binding:
        settle_key(fn)
        bind_to_device(fn)  # which brings `compile`
        compile_here = getattr(fn, "compile", None)
        if compile_here is not None and not isinstance(compile_here, _Elsewhere):
            fn.compile = _Elsewhere(compile_here)
    _local.asks_worker, _local.begin = True, begin
    try:
        yield
    finally:
        _local.asks_worker = False


class _Compiled(BaseException):
    """A worker has compiled the form. No `Exception`, whose tracebacks Triton edits."""


class _Elsewhere:
    """In the place of Triton's `compile` for one jit function."""

    def __init__(self, compile_here: Callable[..., Any]) -> None:
        self.compile_here = compile_here

    def __call__(self, src: Any, **arguments: Any) -> Any:
        if not getattr(_local, "asks_worker", False):
            return self.compile_here(src, **arguments)

        def compile_there() -> None:
            form = _packed(src, arguments.get("target"), arguments.get("options"))
            if form is not None and _processes.compile(form, _local.begin):
                raise _Compiled

        try:
            return self._if_missed(compile_there, src, arguments)
        except _Compiled:
            return self._if_missed(lambda: _processes.in_vain(src.name), src, arguments)

    def _if_missed(self, call: Callable[[], None], src: Any, arguments: dict[str, Any]) -> Any:
        """Triton's `compile`, which asks the source for code where the disk cache has none: before
        that, `call`."""

        def make_ir(*args: Any) -> Any:
            del src.make_ir
            call()
            return src.make_ir(*args)

        src.make_ir = make_ir
        try:
            return self.compile_here(src, **arguments)
        finally:
            vars(src).pop("make_ir", None)


def _packed(src: Any, target: Any, options: Any) -> bytes | None:
    """A form as workers take it; None for what they cannot find."""
    fn = src.fn
    if fn.module.partition(".")[0] != _PACKAGE or target is None:
        return None
    fields = {name: value for name, value in vars(src).items() if name not in ("fn", "make_ir")}
    try:
        return pickle.dumps((dict(os.environ), (fn.module, fn.fn.__name__), fields, target, options))
    # Constants of any kind.
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        log.logger.debug("a form for no worker process: %s", error)
        return None
