"""Tables of what differs from a framework, run row by row: a check for every row, a row for every
check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.docs import pages

Check = Callable[..., None]


class Differences:
    """The table under `header` on a page of the docs; column: of what holds here."""

    def __init__(self, page: str, header: str, column: int = 0) -> None:
        rows = pages.table(pages.ROOT / "docs" / page, header)
        self.rows = [row[column] for row in rows]
        self.checks: dict[str, Check] = {}

    def row(self, beginning: str) -> Callable[[Check], Check]:
        """Marks the check of the row that begins so."""

        def mark(check: Check) -> Check:
            assert beginning not in self.checks, beginning
            self.checks[beginning] = check
            return check

        return mark

    def of(self, row: str) -> Check:
        (found,) = (check for name, check in self.checks.items() if row.startswith(name))
        return found

    def assert_complete(self) -> None:
        """Every row has one check, every check one row."""
        found = {row: [name for name in self.checks if row.startswith(name)] for row in self.rows}
        assert {row for row, names in found.items() if len(names) != 1} == set()
        used: list[Any] = [name for names in found.values() for name in names]
        assert sorted(used) == sorted(self.checks)
