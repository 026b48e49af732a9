"""Whether ranks compute what one process computes: how far apart, and how far they may be.

**Curves.** Sums in another order are rounded otherwise, and training amplifies that, so no fixed
bound fits all steps. Runs of one process with the items of every batch in other orders measure it:
the noise of a step is the largest relative difference of any two of them, in this step or before.
Ranks may be `NOISE` times as far from one process. A rounding grows by the same factors whatever
its cause, and ranks add roundings of that size in every norm and gradient. Before training has
amplified anything, noise is some 1e-6; statistics of each rank alone, which a run of its own has as
an example of what must not pass, are wrong by more than a hundred times that.

**Checkpoints.** Weights and momenta have the same bits wherever they are loaded. What is computed
from them is rounded otherwise on another device or number of ranks: the loss of a scene by `LOSS`
at most, and behind two more steps by `NEXT`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

__all__ = ["Distance", "curves", "failures"]

Row = dict[str, Any]

NOISE = 10.0
FLOOR = 1e-6  # eight times the distance of neighbouring fp32 numbers: one scene may have no noise
LOSS, NEXT = 1e-5, 1e-3


@dataclasses.dataclass(frozen=True)
class Distance:
    """Of one run's losses from those of one process. `apart` and `noise` are largest relative
    differences, `first_*` of the first steps; `worst`: the largest ratio of a step's to its bound.
    """

    peer: str
    run: str
    first_apart: float
    apart: float
    first_noise: float
    noise: float
    worst: float
    must_agree: bool

    @property
    def expected(self) -> bool:
        return (self.worst <= 1) == self.must_agree


def curves(rows: list[Row], first: int = 20) -> Iterator[Distance]:
    """One per peer and run on several ranks."""
    alone = [row for row in rows if row["ranks"] == 1]
    for name, base in alone[0]["losses"].items() if alone else ():
        pairs = list(itertools.combinations([row["losses"][name] for row in alone], 2))
        each = (max((_apart(*values) for values in pair), default=0.0) for pair in _by_step(pairs, len(base)))
        noise = list(itertools.accumulate(each, max))
        for row in rows:
            if row["ranks"] == 1:
                continue
            apart = [_apart(*values) for values in zip(row["losses"][name], base, strict=False)]
            ratios = [one / max(NOISE * other, FLOOR) for one, other in zip(apart, noise, strict=False)]
            yield Distance(
                name,
                f"{row['ranks']} ranks, {row['norms']} norms",
                max(apart[:first]),
                max(apart),
                noise[: len(apart)][:first][-1],
                noise[len(apart) - 1],
                max(ratios),
                row["norms"] == "joint",
            )


def failures(part: str, rows: list[Row]) -> list[str]:
    """What does not agree, a line each."""
    if part == "curves":
        return list(_of_curves(rows))
    return list(_of_checkpoints(rows)) if part == "checkpoint" else []


def _of_curves(rows: list[Row]) -> Iterator[str]:
    if sum(row["ranks"] == 1 for row in rows) < 2 or all(row["ranks"] == 1 for row in rows):
        yield "curves: needs runs of one process in two orders, and of several ranks"
        return
    wild = [name for row in rows for name, losses in row["losses"].items() if not all(map(math.isfinite, losses))]
    if wild:
        yield f"curves: losses of {', '.join(dict.fromkeys(wild))} are not finite"
        return
    for one in curves(rows):
        if not one.expected:
            what = "beyond" if one.must_agree else "within"
            yield f"curves: {one.peer}, {one.run}: {what} the bound, {one.worst:.1e} of it"


def _of_checkpoints(rows: list[Row]) -> Iterator[str]:
    saved = {row["peer"]: row["of_ranks"][0] for row in rows if row["part"] == "save"}
    loads = [row for row in rows if row["part"] == "load"]
    if not saved.keys() or saved.keys() != {row["peer"] for row in loads}:
        yield "checkpoint: needs one that is saved and loaded"
        return
    for row in loads:
        where, wanted = f"checkpoint: {row['peer']}, {row['ranks']} ranks, {row['device']}", saved[row["peer"]]
        for what in ("weights", "momenta"):
            if row["of_ranks"][0][what] != wanted[what]:
                yield f"{where}: other {what}"
        for one in row["of_ranks"]:
            after = max(_apart(*pair) for pair in zip(one["next"], wanted["next"], strict=True))
            for what, apart, most in (("loss", _apart(one["loss"], wanted["loss"]), LOSS), ("next", after, NEXT)):
                if apart > most:
                    yield f"{where}: another {what}, by {apart:.1e}"


def _by_step(pairs: list[tuple[list[float], list[float]]], steps: int) -> Iterator[list[tuple[float, float]]]:
    for step in range(steps):
        yield [(one[step], other[step]) for one, other in pairs]


def _apart(one: float, other: float) -> float:
    """The relative difference; infinite where one of them is not finite."""
    found = abs(one - other) / abs(other) if other else math.inf
    return found if math.isfinite(found) else math.inf
