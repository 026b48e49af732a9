"""Comparing an answer with the recorded one: what may differ by how much, and what is exact."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

__all__ = ["Measure", "Mismatch", "Report", "dtype_name", "numpy_of"]


class Mismatch(Exception):
    """The candidate ran, but its answer differs from the recorded one."""


def numpy_of(value: Any) -> np.ndarray:
    """A tensor of torch or of a framework, an array or a number as an array."""
    if torch.is_tensor(value):
        value = value.detach().cpu()
        return (value.float() if value.dtype in (torch.float16, torch.bfloat16) else value).numpy()
    return np.array(value.numpy()) if hasattr(value, "numpy") else np.asarray(value)


def dtype_name(value: Any) -> str:
    """`float32`, of a tensor as of an array."""
    return str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")


@dataclasses.dataclass(frozen=True)
class Measure:
    """The error of an entry: its difference, divided by the RMS of the recorded array.

    An RMS that is not above `floor` counts as `instead`. per_entry: the recorded entry is added to
    the RMS.
    """

    floor: float
    instead: float
    per_entry: bool = False

    def errors(self, got: np.ndarray, want: np.ndarray) -> np.ndarray:
        rms = float(np.sqrt(np.mean(want**2)))
        scale = rms if rms > self.floor else self.instead
        return np.abs(got - want) / (scale + np.abs(want) if self.per_entry else scale)


class Report:
    """The comparisons of one case: how many, and the error of every array. The first that fails
    raises `Mismatch`."""

    def __init__(self, measure: Measure, tolerance: float) -> None:
        self.measure, self.tolerance = measure, tolerance
        self.errors: dict[str, float] = {}
        self.comparisons = 0

    @property
    def worst(self) -> float:
        return max(self.errors.values(), default=0.0)

    @property
    def where(self) -> str:
        return max(self.errors, key=lambda label: self.errors[label], default="exact")

    def require(self, holds: bool, reason: str) -> None:
        """One comparison whose outcome is `holds`."""
        self.comparisons += 1
        if not holds:
            raise Mismatch(reason)

    def same(self, label: str, got: Any, want: Any) -> None:
        """Equal Python values."""
        self.require(got == want, f"{label}: {got!r} instead of {want!r}")

    def close(self, label: str, got: Any, want: np.ndarray, tolerance: float | None = None, mean: bool = False) -> None:
        """Every error within the tolerance; with `mean`, their root mean square."""
        limit = self.tolerance if tolerance is None else tolerance
        g, w = self._shaped(label, got, want)
        if w.size == 0:
            return
        g, w = g.astype(np.float64), w.astype(np.float64)
        known = np.isfinite(w)
        if not (np.isfinite(g) == known).all() or not np.array_equal(g[~known], w[~known], equal_nan=True):
            raise Mismatch(f"{label}: {int((~np.isfinite(g)).sum())} values are not finite")
        g, w = np.where(known, g, 0), np.where(known, w, 0)
        errors = self.measure.errors(g, w)
        error = float(np.sqrt(np.mean(errors**2)) if mean else errors.max())
        self.errors[label] = error
        if not error <= limit:
            at = np.unravel_index(int(errors.argmax()), errors.shape)
            bad = float((errors > limit).mean())
            raise Mismatch(
                f"{label}: error {error:.2e}, allowed {limit:.0e}; {bad:.1%} of the entries are "
                f"off, most at {tuple(map(int, at))}: {g[at]:.6g} instead of {w[at]:.6g}"
            )

    def exact(self, label: str, got: Any, want: np.ndarray) -> None:
        """Equal arrays."""
        g, w = self._shaped(label, got, want)
        if not np.array_equal(g, w):
            raise Mismatch(f"{label}: {int((g != w).sum())} of {w.size} entries differ")

    def array(self, label: str, got: Any, want: np.ndarray, tolerance: float | None = None) -> None:
        """Integers exactly, floating values within the tolerance."""
        if want.dtype.kind == "f":
            self.close(label, got, want, tolerance)
        else:
            self.exact(label, got, want)

    def rows(self, label: str, got: Any, want: np.ndarray, ordered: bool = False) -> np.ndarray:
        """The same rows equally often, `ordered`: in the same order. Returns where every recorded
        row is in `got`."""
        self.comparisons += 1
        got = numpy_of(got)
        if got.ndim != 2 or got.shape[1] != want.shape[1]:
            raise Mismatch(f"{label}: shape {got.shape} instead of {want.shape}")
        mine, recorded = (np.lexsort(rows.T[::-1]) for rows in (got, want))
        if len(got) != len(want) or not np.array_equal(got[mine], want[recorded]):
            a, b = ({tuple(row) for row in rows.tolist()} for rows in (got, want))
            raise Mismatch(
                f"{label}: {len(got)} rows instead of {len(want)}; missing {len(b - a)} "
                f"{sorted(b - a)[:2]}, extra {len(a - b)} {sorted(a - b)[:2]}"
            )
        if ordered and not np.array_equal(got, want):
            raise Mismatch(f"{label}: the right rows, but not in the order that is defined")
        places = np.empty(len(want), np.int64)
        places[recorded] = mine
        return places

    def _shaped(self, label: str, got: Any, want: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        got = numpy_of(got)
        self.comparisons += 1
        if got.shape != want.shape:
            raise Mismatch(f"{label}: shape {list(got.shape)} instead of {list(want.shape)}")
        return got, want
