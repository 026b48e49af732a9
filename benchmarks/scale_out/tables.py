"""What a record says, as lines and as tables."""

from __future__ import annotations

import statistics
from typing import Any

from . import agreement

__all__ = ["line", "table"]

Row = dict[str, Any]


def line(part: str, row: Row) -> str:
    """One run, in one line."""
    if "error" in row:
        return f"{part}: {row['error'].splitlines()[0]}"
    if part == "throughput":
        return f"{row['peer']}, {row['ranks']} ranks: {_samples(row):.1f} samples a second"
    if part == "first_step":
        return f"{row['ranks']} ranks, {row['caches']} caches: {_first(row):.1f} s"
    if part == "curves":
        ends = ", ".join(f"{name} {losses[-1]:.4f}" for name, losses in row["losses"].items())
        return f"{row['ranks']} ranks, {row['order']} order, {row['norms']} norms: {ends}"
    return f"{row['part']} {row['peer']}, {row['ranks']} ranks, {row['device']}: loss {row['of_ranks'][0]['loss']}"


def table(part: str, rows: list[Row]) -> str:
    """Markdown; failed runs are left out."""
    good = [row for row in rows if "error" not in row]
    return "\n".join(["", *_TABLES[part](good), ""]) if good else ""


def _samples(row: Row) -> float:
    """The median round of the slowest rank: all wait for it."""
    return min(statistics.median(one["samples_per_second"]) for one in row["of_ranks"])


def _first(row: Row) -> float:
    return max(one["steps"][0] for one in row["of_ranks"])


def _throughput(rows: list[Row]) -> list[str]:
    lines = ["| peer | ranks | samples a second | x one rank | x spconv | balance |", "|---|---|---|---|---|---|"]
    figures = {(row["peer"], row["ranks"]): _samples(row) for row in rows}
    for row in rows:
        own = figures[row["peer"], row["ranks"]]
        alone, spconv = figures.get((row["peer"], 1)), figures.get(("spconv", row["ranks"]))
        ratios = " | ".join(f"{own / one:.2f}" if one else "" for one in (alone, spconv))
        balance = row["of_ranks"][0]["balance"]
        lines.append(f"| {row['peer']} | {row['ranks']} | {own:.1f} | {ratios} | {balance:.3f} |")
    return lines


def _first_step(rows: list[Row]) -> list[str]:
    lines = [
        "| ranks | caches | seconds | x one rank | first step alone | variants compiled by ranks' workers | kernels |",
        "|---|---|---|---|---|---|---|",
    ]
    alone = {row["caches"]: _first(row) for row in rows if row["ranks"] == 1}
    for row in rows:
        own, ranks = _first(row), row["of_ranks"]
        ratio = f"{own / alone[row['caches']]:.2f}" if row["caches"] in alone else ""
        step = max(one["steps"][0] - one["ready"] for one in ranks)
        compiled = sum(one["compiled"] for one in ranks)
        lines.append(
            f"| {row['ranks']} | {row['caches']} | {own:.1f} | {ratio} | {step:.1f} | {compiled} | {row['kernels']} |"
        )
    return lines


def _curves(rows: list[Row]) -> list[str]:
    """Largest relative differences from one process, in the first 20 steps and in all. Noise: of
    one process from itself, with batches in other orders."""
    header = "| peer | run | 20 steps | noise | all steps | noise | of the bound | bound |"
    lines = [header, "|---|---|---|---|---|---|---|---|"]
    for one in agreement.curves(rows):
        held = "held" if one.worst <= 1 else "exceeded"
        held += "" if one.must_agree else f", {'as it must be' if one.expected else 'and must not be'}"
        lines.append(
            f"| {one.peer} | {one.run} | {one.first_apart:.1e} | {one.first_noise:.1e} | {one.apart:.1e} | "
            f"{one.noise:.1e} | {one.worst:.1e} | {held} |"
        )
    return lines


def _checkpoint(rows: list[Row]) -> list[str]:
    lines = [
        "| peer | part | ranks | device | weights | momenta | loss | logits | next losses |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        one = row["of_ranks"][0]
        after = ", ".join(f"{loss:.6f}" for loss in one["next"])
        where = f"{row['peer']} | {row['part']} | {row['ranks']} | {row['device']}"
        state = f"{one['weights']} | {one['momenta']} | {one['loss']:.6f} | {one['logits']}"
        lines.append(f"| {where} | {state} | {after} |")
    return lines


_TABLES = {"throughput": _throughput, "first_step": _first_step, "curves": _curves, "checkpoint": _checkpoint}
