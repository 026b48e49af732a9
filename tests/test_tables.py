from __future__ import annotations

import io

import pytest

from sparse_bridge import tables
from sparse_bridge.tables import Column, Table

COLUMNS = (Column("name", True), Column("much", spare=2), Column("empty"), Column("more", spare=1))
MADE = Table("A title", COLUMNS, [("a<b", "1", "", "22")], [("all", "1", "", "22")], "A remark.")


def test_narrow_terminals_get_fewer_columns_and_whole_cells():
    assert MADE.visible_columns() == [0, 1, 3], "an empty column says nothing"
    assert (MADE.visible_columns(80), MADE.visible_columns(16), MADE.visible_columns(8)) == ([0, 1, 3], [0, 3], [0])
    for width in (16, 40):
        text = MADE.plain(width)
        assert max(map(len, text.splitlines())) <= width and "a<b" in text and "A remark" in text


def test_words_continue_on_the_next_line():
    words = "groups of two are not supported here"
    table = Table("", (Column("layer"), Column("reason", True)), [("12345", words)])
    lines = table.plain(30).splitlines()
    assert max(map(len, lines)) <= 30 and "12345" in table.plain(30) and "…" not in table.plain(30)
    assert " ".join(line.split("│")[2].strip() for line in lines if "│" in line) == words


def test_html_is_escaped_and_aligned():
    page = MADE.html()
    assert "a&lt;b" in page and "a<b" not in page and "empty" not in page
    assert page.count("<tr>") == 3 and page.count("<tfoot>") == 1
    assert '<td style="text-align:right;white-space:nowrap">22</td>' in page
    assert Table("t", COLUMNS, []).html() == '<caption style="text-align:left"><b>t</b></caption>'


def test_the_width_of_pipes_and_of_COLUMNS(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert tables.terminal_width() == tables.WIDE, "no terminal"
    monkeypatch.setenv("COLUMNS", "72")
    assert tables.terminal_width() == 72


@pytest.mark.parametrize(("value", "text"), [(None, ""), (3 << 20, "3.0"), (0, "0.0")])
def test_megabytes(value, text):
    assert tables.megabytes(value) == text
