"""The table of streams in README.md and docs/speed.md, from one record: `python -m sparse_bridge bench report FILE
--headline`, with the pages to write it into or without."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from pathlib import Path

from sparse_bridge.errors import ShapeError

from .report import as_table, digits
from .results import Comparison, Figure, Ratio, Run

__all__ = ["details", "facts", "headline", "write_into"]

_PEERS = {
    "bridge": "spconv's API",
    "bridge_torchsparse": "torchsparse's",
    "bridge_minkowski": "MinkowskiEngine's",
    "bridge_fuse": "spconv's, no replays",
    "bridge_graphs": "spconv's, graphs",  # of records from before steps were replayed by default
}
_NETWORKS = {"unet": "U-Net", "second": "SECOND"}


def headline(run: Run) -> str:
    """How many times as fast as the base each further peer is; a peer slower than the base gets a
    number below 1."""
    _, *others = run.peers
    rows = []
    for one in _streams(run):
        ratios = {figure.peer: one.ratio(figure) for figure in one.others}
        if any(ratios.values()):
            rows.append([_words(one, ", one scene at a time"), *(_times(ratios.get(peer)) for peer in others)])
    return as_table(["stream of scenes", *(_PEERS.get(peer, peer) for peer in others)], rows)


def details(run: Run) -> str:
    """The same with quartiles, and with what both sides take: median and what nine calls of ten stay below."""
    base = run.peers[0]
    header = ["stream, API", "times as fast", "quartiles", "ms, nine of ten below", f"{base}, ms, nine of ten below"]
    rows = []
    for one in _streams(run):
        for figure in one.others:
            ratio = one.ratio(figure)
            if ratio is not None:
                name = f"{_words(one)}: {_PEERS.get(figure.peer, figure.peer)}"
                spread = f"{1 / ratio.high:.1f} to {1 / ratio.low:.1f}"
                rows.append([name, _times(ratio), spread, _calls(figure), _calls(one.base)])
    return as_table(header, rows)


def facts(run: Run) -> str:
    """A sentence of what a reader needs to judge the tables: machine, versions, commit, date, method."""
    base, mine = run.versions[run.peers[0]], run.versions[run.peers[1]]
    rounds = {len(figure.rounds) for one in _streams(run) for figure in one.others if figure.rounds}
    when = datetime.datetime.strptime(run.started, "%Y-%m-%d %H:%M UTC")
    gpu = " ".join(str(run.machine["gpu"]).split()[:2]).rstrip(",")
    return (
        f"{gpu}, {run.machine['cores']} CPU cores, torch {base['torch'].partition('+')[0]}, Python {base['python']}, "
        f"spconv {base['spconv']}, sparse_bridge {mine['sparse_bridge']} at commit {run.machine['commit']}, "
        f"{when.day} {when:%B %Y}. Each figure is the median over {' or '.join(map(str, sorted(rounds)))} rounds of "
        f"the ratio within a round, in which all take turns; so it is not the quotient of two medians."
    )


def write_into(page: Path, run: Run) -> None:
    """Put tables and facts where the page has those of an earlier record.

    Raises:
        ShapeError: the page has no such table.
    """
    text, places = page.read_text(encoding="utf-8"), 0
    for new in (headline(run), details(run)):
        first = re.escape(new.split("|")[1].strip())
        old = re.compile(rf"^\| {first} \|.*\n(?:\|.*\n)*", flags=re.M)
        text, count = old.subn(lambda _, new=new: new + "\n", text)
        places += count
    if not places:
        raise ShapeError(
            f"{page}: no table of streams; expected a page with a table that begins with '| stream of scenes |'."
        )
    text = re.sub(r"^NVIDIA .*? two medians\.$", lambda _: facts(run), text, flags=re.M)
    page.write_text(text, encoding="utf-8")


def _streams(run: Run) -> Iterator[Comparison]:
    return (one for one in run.comparisons() if one.base.suite == "stream")


def _words(one: Comparison, single: str = "") -> str:
    batch = ", batch of 4" if one.base.scene.endswith("_x4") else single
    shape, _, work = one.base.label.partition(", ")
    return f"{_NETWORKS[one.base.subject]}, {work}, {shape.removeprefix('stream of ')}{batch}"


def _times(ratio: Ratio | None) -> str:
    return f"{1 / ratio.median:.1f}" if ratio else "-"


def _calls(figure: Figure) -> str:
    return ", ".join(digits(value) for value in (figure.ms, figure.p90) if value)
