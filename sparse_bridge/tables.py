"""Tables for terminals and notebooks: the columns that there is room for, the same rows in both."""

from __future__ import annotations

import dataclasses
import html
import io
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table as RichTable

WIDE = 140  # characters where nobody says how many: pipes, files, logs


@dataclasses.dataclass(frozen=True)
class Column:
    """text: words, read from the left, on several lines where there is no room; numbers stand at
    the right.  spare: narrow terminals do without it, the highest number first; 0 is always
    shown."""

    name: str
    text: bool = False
    spare: int = 0


@dataclasses.dataclass(frozen=True)
class Table:
    """A title, rows of cells, rows of sums, and a remark below.

    Columns in which no row says anything are left out.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    sums: Sequence[Sequence[str]] = ()
    remark: str = ""

    def visible_columns(self, width: int | None = None) -> list[int]:
        """Indices of the columns that fit into `width` characters whole; None: all that say
        something."""
        every = [*self.rows, *self.sums]
        filled = [i for i in range(len(self.columns)) if any(row[i] for row in every)]
        if width is None:
            return filled
        needed = {i: max(len(self.columns[i].name), *(len(row[i]) for row in every)) for i in filled}
        fits = fitting(needed, {i: self.columns[i].spare for i in filled}, width)
        return [i for i in filled if i in fits]

    def rich(self, width: int) -> RichTable:
        """Its rows for a rich console of this width."""
        from rich.table import Table as Rich
        from rich.text import Text

        columns = self.visible_columns(width)
        table = Rich()
        for index in columns:
            column = self.columns[index]
            table.add_column(
                column.name, justify="left" if column.text else "right", no_wrap=not column.text, overflow="fold"
            )
        for row in self.rows:
            table.add_row(*(Text(row[index]) for index in columns))
        if self.sums:
            table.add_section()
        for row in self.sums:
            table.add_row(*(Text(row[index]) for index in columns), style="bold")
        return table

    def plain(self, width: int | None = None) -> str:
        """Without colours.  width: in characters; None: the terminal's, or `WIDE` elsewhere."""
        from rich.console import Console

        width = terminal_width() if width is None else width
        console = Console(file=io.StringIO(), emoji=False, width=width, color_system=None, highlight=False)
        console.print(self.rich(width))
        file: Any = console.file
        lines = [line.rstrip() for line in file.getvalue().splitlines()]
        around = [textwrap.wrap(text, max(width, 20)) for text in (self.title, self.remark)]
        return "\n".join([*around[0], *lines, *around[1]])

    def html(self) -> str:
        """For a notebook."""
        fits = self.visible_columns()
        styles = [f"text-align:{'left' if self.columns[index].text else 'right'};white-space:nowrap" for index in fits]

        def line(cells: Sequence[str], tag: str) -> str:
            text = (
                f'<{tag} style="{style}">{html.escape(cells[index])}</{tag}>'
                for index, style in zip(fits, styles, strict=True)
            )
            return f"<tr>{''.join(text)}</tr>"

        head = line([column.name for column in self.columns], "th")
        body = "".join(line(row, "td") for row in self.rows)
        feet = "".join(line(row, "th") for row in self.sums)
        name = html.escape(self.title)
        title = f'<caption style="text-align:left"><b>{name}</b></caption>' if name else ""
        remark = f"<p>{html.escape(self.remark)}</p>" if self.remark else ""
        foot = f"<tfoot>{feet}</tfoot>" if feet else ""
        if not fits:
            return title + remark
        table = f"<table>{title}<thead>{head}</thead><tbody>{body}</tbody>{foot}</table>"
        return f'<div style="overflow-x:auto">{table}</div>{remark}'


def fitting(needed: dict[int, int], spare: dict[int, int], width: int) -> set[int]:
    """The columns of a bordered table that fit into `width` characters.

    needed: characters of each.  spare: as of `Column`.
    """
    widths = dict(needed)
    for index in sorted((i for i in needed if spare[i]), key=lambda i: -spare[i]):
        if 1 + sum(3 + size for size in widths.values()) <= width:
            break
        del widths[index]
    return set(widths)


def terminal_width() -> int:
    """Of standard output; `COLUMNS` decides where it is set, `WIDE` where it is no terminal."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    if terminal or os.environ.get("COLUMNS", "").isdigit():
        return shutil.get_terminal_size((WIDE, 24)).columns
    return WIDE


def megabytes(size: int | None) -> str:
    """In MiB, with one decimal; "" for None."""
    return "" if size is None else f"{size / 2**20:,.1f}"


def times(values: Sequence[int] | None) -> str:
    """`3x3x3`; "" for None."""
    return "" if values is None else "x".join(map(str, values))
