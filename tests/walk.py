"""The walk of one call through the package: which files it enters, how often, in how many calls.

python -m tests.walk_apis      # a steady and a cold layer of every framework, as a table
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import sparse_bridge

__all__ = ["Walk", "walk"]

_ROOT = str(pathlib.Path(sparse_bridge.__file__).parent) + "/"


@dataclasses.dataclass
class Walk:
    """calls: (file, function, named arguments, whether another file called it) of the package's
    Python functions, in the order in which they ran."""

    calls: list[tuple[str, str, int, bool]]

    @property
    def entered(self) -> dict[str, int]:
        """How often each file was entered from another one, in the order of first entry."""
        return dict(collections.Counter(file for file, _, _, entry in self.calls if entry))

    @property
    def called(self) -> int:
        return len(self.calls)

    @property
    def files(self) -> list[str]:
        return list(self.entered)

    @property
    def twice(self) -> list[str]:
        """Files that were entered more than once."""
        return [name for name, times in self.entered.items() if times > 1]

    def until(self, file: str, function: str) -> Walk:
        """The part up to the first call of a function. Raises ValueError where there is none."""
        return Walk(self.calls[: [call[:2] for call in self.calls].index((file, function)) + 1])

    def wide(self, most: int) -> list[str]:
        """Functions that name more than `most` arguments."""
        return [f"{file}:{name}" for file, name, n, _ in self.calls if n > most]


def walk(run: Callable[[], object]) -> Walk:
    """What `run` enters; comprehensions and generators count with the function they stand in."""
    calls: list[tuple[str, str, int, bool]] = []

    def hear(frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        name = code.co_filename
        if event != "call" or not name.startswith(_ROOT) or code.co_name[0] == "<":
            return
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(_ROOT):
            caller = caller.f_back  # torch's own code in between
        entry = caller is None or caller.f_code.co_filename != name
        n_arguments = code.co_argcount + code.co_kwonlyargcount
        calls.append((name.removeprefix(_ROOT), code.co_name, n_arguments, entry))

    before = sys.getprofile()
    sys.setprofile(hear)
    try:
        run()
    finally:
        sys.setprofile(before)
    return Walk(calls)
