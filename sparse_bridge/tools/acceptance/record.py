"""What a proof leaves: lines for the terminal, a JSON file, Markdown to paste."""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Sequence
from typing import Any

from ..._version import __version__
from .. import doctor
from ..harness import results
from .setup import FAILED, PASSED, SKIPPED, Outcome, Setup

SCHEMA = 1
_MARKS = {PASSED: "pass", FAILED: "FAIL", SKIPPED: "skip"}


def line(outcome: Outcome) -> str:
    """One line for the terminal."""
    return f"{_MARKS[outcome.status]}  {outcome.name:<32} {outcome.detail}  ({outcome.seconds:.1f} s)"


def counts(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How many passed, failed and were skipped."""
    by_status = collections.Counter(outcome.status for outcome in outcomes)
    return {status: by_status[status] for status in _MARKS}


def machine() -> dict[str, Any]:
    """What `doctor` says of this machine; the self-check is a check of the proof."""
    facts = doctor.collect(self_check=False)
    return {key: value for key, value in facts.items() if key not in ("caches", "settings")}


def values(setup: Setup, facts: dict[str, Any], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Everything, as JSON values."""
    return {
        "sparse_bridge": __version__,
        "device": setup.title,
        "architecture": setup.target and setup.target.arch,
        "emulated": setup.emulated,
        "counts": counts(outcomes),
        "seconds": round(sum(outcome.seconds for outcome in outcomes), 1),
        "outcomes": [
            {
                "name": check.name,
                "status": check.status,
                "detail": check.detail,
                "seconds": round(check.seconds, 2),
                "figures": check.figures,
            }
            for check in outcomes
        ],
        "machine": facts,
    }


def save(path: pathlib.Path, content: dict[str, Any]) -> None:
    """Write it, whole or not at all."""
    results.save(path, SCHEMA, content)


def markdown(content: dict[str, Any]) -> str:
    """A table for an issue."""
    facts, counted = content["machine"], content["counts"]
    build = [f"{k} {facts[k.lower()]}" for k in ("CUDA", "ROCm") if facts.get(k.lower())]
    head = (
        f"**{content['device']}**: {counted[PASSED]} passed, {counted[FAILED]} failed, "
        f"{counted[SKIPPED]} skipped in {content['seconds']:.0f} s. sparse_bridge "
        f"{content['sparse_bridge']}, torch {facts['torch']}, Triton {facts['triton']}, "
        f"{', '.join(build) or 'CPU build'}, {facts['platform']}."
    )
    rows = [f"| {_MARKS[row['status']]} | {row['name']} | {_cell(row['detail'])} |" for row in content["outcomes"]]
    return "\n".join([head, "", "| | check | result |", "|---|---|---|", *rows, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
