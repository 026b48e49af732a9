"""Values of command lines: refused where they are read, before a command imports or does anything."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

_Number = TypeVar("_Number", int, float)


def number(
    kind: type[_Number], least: float | None = None, most: float | None = None, *, above: float | None = None
) -> Callable[[str], _Number]:
    """The `type` of an option that takes numbers of `least` to `most`, or greater than `above`."""

    if least is not None:
        expected = f"{least} or more" if most is None else f"{least} to {most}"
    else:
        expected = f"a number above {above:g}" + (f", at most {most:g}" if most is not None else "")

    def read(text: str) -> _Number:
        value = kind(text)
        low = value >= least if least is not None else above is not None and value > above
        if not low or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"got {text}; expected {expected}")
        return value

    read.__name__ = kind.__name__  # argparse names it where the text is no number
    return read


def path(text: str) -> Path:
    """The `type` of an option that takes a file or folder: an empty text, as of a variable that is not set, is none."""
    if not text:
        raise argparse.ArgumentTypeError("got an empty text; expected a path")
    return Path(text)
