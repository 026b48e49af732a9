"""A framework while it is enabled, and what is still known of it afterwards."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable

from ..alias_names import PackageNames
from ..base import Framework


@dataclasses.dataclass
class Active:
    """names: its further import names.  holders: handles that have not let go.  was_imported: when
    it was disabled, which takes its modules away."""

    adapter: Framework
    mode: str
    reason: str
    version: str | None
    names: PackageNames
    undo: Callable[[], None]
    holders: int = 0
    was_imported: bool = False

    @property
    def imported(self) -> bool:
        """Whether this process has imported the framework."""
        return self.was_imported or any(name in sys.modules for name in self.adapter.packages)
