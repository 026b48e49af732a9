"""Records of the earlier benchmark scripts as runs of today."""

from __future__ import annotations

from typing import Any

from .results import Figure, Run

__all__ = ["convert"]

_WORKS = {
    "forward": "forward",
    "fresh map + forward": "fresh",
    "forward + backward": "train",
    "inference": "infer",
    "training step": "step",
    "infer": "infer",
    "train": "step",
}


def convert(content: dict[str, Any]) -> Run:
    """Take the JSON of the GPU script (`versions`, `rows`) or of the CPU script (`title`, `rows`).

    Raises:
        KeyError: it is neither.
    """
    return _gpu(content) if "versions" in content else _cpu(content)


def _gpu(content: dict[str, Any]) -> Run:
    """One time and its 10 % and 90 % quantiles per figure; the peers ran one after the other."""
    versions = content["versions"]
    figures = []
    for row in content["rows"]:
        subject, _, place = row["case"].partition(", ")
        layer = subject.startswith("C = ")
        channels = int(subject[4:]) if layer else 0
        scan, _, batch = place.rpartition(" x ")
        suite = ("shells" if scan.startswith("shell") else "layers") if layer else "networks"
        figures.append(
            _figure(
                suite,
                scan if batch == "1" else f"{scan}_x{batch}",
                f"c{channels}" if layer else subject,
                row["dtype"],
                row["work"],
                row["peer"],
                rows=row["rows"],
                channels=channels,
                ms=row["ms"],
                low=row["low"],
                high=row["high"],
                peak_mb=row["peak_mb"],
                first_s=row.get("first_s"),
            )
        )
    gpu = next(iter(versions.values()))["gpu"]
    note = "Recorded peer after peer, not in paired rounds; spreads of times are 10 .. 90 %."
    return Run(list(versions), figures, {"gpu": gpu}, versions, notes=[note])


def _cpu(content: dict[str, Any]) -> Run:
    """Paired rounds in one process; ratios were native / bridged, from lowest to highest."""
    rows = [int(word) for word in content["title"].replace(",", " ").split() if word.isdigit()]
    figures = []
    for row in content["rows"]:
        place = ("cpu", row["scan"], f"{row['network']}-t{row['threads']}", "fp32", row["run"])
        shared = {"rows": rows[0] if rows else 0}
        ratio = [1 / row["ratio"], 1 / row["high"], 1 / row["low"]]
        figures.append(_figure(*place, "spconv", ms=row["native_s"] * 1e3, **shared))
        bridged = row["bridged_s"] * 1e3
        figures.append(_figure(*place, "bridge_patch", ms=bridged, ratio=ratio, **shared))
    notes = [content["title"], "The ranges of the ratios are lowest .. highest."]
    return Run(["spconv", "bridge_patch"], figures, notes=notes)


def _figure(suite: str, scene: str, subject: str, dtype: str, work: str, peer: str, **more: Any) -> Figure:
    slug = _WORKS[work]
    name = f"{suite}/{scene}/{subject}/{dtype}/{slug}"
    label = {"infer": "inference", "step": "training step"}.get(slug, work)
    return Figure(name, peer, suite, scene, subject, dtype, slug, label, **more)
