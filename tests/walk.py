"""The walk of one call through the package: which files it enters, how often, in how many calls.

python -m tests.walk            # a steady and a cold layer of every framework, as a table
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
    """entered: how often each file was entered from another one, in the order of first entry;
    called: Python functions of the package that ran."""

    entered: dict[str, int]
    called: int

    @property
    def files(self) -> list[str]:
        return list(self.entered)

    @property
    def twice(self) -> list[str]:
        """Files that were entered more than once."""
        return [name for name, times in self.entered.items() if times > 1]


def walk(run: Callable[[], object]) -> Walk:
    """What `run` enters; comprehensions and generators count with the function they stand in."""
    entered: collections.Counter[str] = collections.Counter()
    called = 0

    def hear(frame: Any, event: str, _: object) -> None:
        nonlocal called
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(_ROOT) or frame.f_code.co_name[0] == "<":
            return
        called += 1
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(_ROOT):
            caller = caller.f_back  # torch's own code in between
        if caller is None or caller.f_code.co_filename != name:
            entered[name.removeprefix(_ROOT)] += 1

    before = sys.getprofile()
    sys.setprofile(hear)
    try:
        run()
    finally:
        sys.setprofile(before)
    return Walk(dict(entered), called)
