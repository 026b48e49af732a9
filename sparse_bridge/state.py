"""Forgetting what a process has learnt.

A module whose functions remember something between calls (a cache, verdicts, a history) has one
function that forgets it, as a rule named `reset`, marked with `owns`. What was chosen (settings,
enabled frameworks, profiles) is not learnt, and stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Reset = TypeVar("Reset", bound=Callable[[], object])

_owners: dict[str, Callable[[], object]] = {}


def owns(reset: Reset) -> Reset:
    """Mark the function that forgets all that its module remembers."""
    _owners[reset.__module__] = reset
    return reset


def owners() -> dict[str, Callable[[], object]]:
    """What forgets, by module, of the modules that were imported."""
    return dict(_owners)


def reset() -> None:
    """Forget what all modules remember, as in a new process: those that were imported last, which
    build on the others, first."""
    for forget in reversed(owners().values()):
        forget()
