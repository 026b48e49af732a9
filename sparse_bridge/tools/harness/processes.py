"""Python processes that exchange JSON lines with this one, and may crash, hang or print.

The parent holds a `Child`. The child's program calls `channel()` first: what libraries print then
goes to the log, and only what it writes to the channel reaches the parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

_ROOT = pathlib.Path(__file__).resolve().parents[3]
_ERROR_LINE = re.compile(r"^[\w.]*(Error|Exception|Interrupt|Exit|Fault)\b.*|^Fatal Python error.*")


def channel() -> IO[str]:
    """In the child: the stream that the parent reads; standard output becomes standard error."""
    stream = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return stream


def write(stream: IO[str], **values: Any) -> None:
    """Send one message."""
    stream.write(json.dumps(values) + "\n")
    stream.flush()


class Child:
    """`python -m module arguments` in a process group of its own, beside the source checkout.

    environment: replaces the variables of this process.  log: a file that its standard error is
    appended to; without one it is kept until `end`.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        log: pathlib.Path | None = None,
    ) -> None:
        variables = dict(os.environ if environment is None else environment)
        folders = [str(_ROOT), *filter(None, [variables.get("PYTHONPATH")])]
        variables["PYTHONPATH"] = os.pathsep.join(folders)
        variables["PYTHONUNBUFFERED"] = "1"  # a log keeps what was printed before a crash
        self._log = tempfile.TemporaryFile("w+") if log is None else log.open("a+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=_ROOT,
            env=variables,
            start_new_session=True,
        )
        self._messages: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._messages.put(line)
        self._messages.put(None)

    def send(self, **values: Any) -> None:
        """One message to the child's standard input; a process that has ended takes none."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            write(self.process.stdin, **values)

    def receive(self, timeout: float) -> dict[str, Any] | None:
        """The next message; None where the process has ended.

        Raises:
            TimeoutError: there is none within `timeout` seconds.
        """
        try:
            line = self._messages.get(timeout=max(timeout, 0.01))
        except queue.Empty:
            raise TimeoutError(f"no answer within {timeout:.0f} s") from None
        if line is None:
            self._messages.put(None)  # for whoever asks again
            self.process.wait()
            return None
        return json.loads(line)

    def ending(self) -> str:
        """How a process that has ended did: by a signal or early, and the last line that names an
        error."""
        code = self.process.wait()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else "ended early"
        return f"{how}: {self._last_error() or f'exit status {code}'}"

    def _last_error(self) -> str:
        """The last line of the log that names an error, or just the last line."""
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        named = [line for line in lines if _ERROR_LINE.match(line)]
        return (named or lines or [""])[-1][:400]

    def kill(self) -> None:
        """End the process and whatever it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(self.process.pid, signal.SIGKILL)
            else:  # Windows, whose tool knows the tree
                tree = ["taskkill", "/F", "/T", "/PID", str(self.process.pid)]
                subprocess.run(tree, capture_output=True, check=False)
        self.process.wait()

    def end(self, patience: float = 0.0) -> None:
        """Close the child's input, wait `patience` seconds for it to end by itself, then kill it
        and close the log."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=patience)
        self.kill()
        self._log.close()
