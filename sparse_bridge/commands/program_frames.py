"""Tracebacks of a user's program that a command runs, without the frames of the command."""

from __future__ import annotations

import sys
from types import CodeType, TracebackType

_WAYS = "runpy", "importlib", "importlib._bootstrap", "importlib._bootstrap_external"


def frames_of_program(trace: TracebackType | None, entry: CodeType) -> TracebackType | None:
    """What of a traceback lies inside of the program that the function of `entry` runs; None: nothing does."""
    while trace is not None and trace.tb_frame.f_code is not entry:
        trace = trace.tb_next
    ways = _WAYS if trace is None else (*_WAYS, trace.tb_frame.f_globals.get("__name__"))
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in ways:
        trace = trace.tb_next
    return trace


def show_program_alone(entry: CodeType) -> None:
    """Have the interpreter print what ends it without the frames between it and the program."""
    shown = sys.excepthook  # which the program may have replaced

    def hook(error_type: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        trace = frames_of_program(trace, entry)
        error.__traceback__ = trace  # the interpreter's own hook prints that one
        shown(error_type, error, trace)

    sys.excepthook = hook
