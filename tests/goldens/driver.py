"""What the runners of recorded answers have in common: options, the loop over cases, the verdict.

A runner knows its framework: how a case is executed, and how its values are compared. It needs
numpy and torch only, and so does this file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

__all__ = ["Mismatch", "cases_of", "enable", "finish", "load_arrays", "parser", "replay"]


class Mismatch(Exception):
    """The candidate ran, but its answer differs from the recorded one."""


def load_arrays(path: str) -> dict[str, np.ndarray]:
    """All arrays of an .npz file."""
    with np.load(path, allow_pickle=False) as z:
        return {k: z[k] for k in z.files}


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every runner has."""
    ap = argparse.ArgumentParser(description=description.splitlines()[0])
    ap.add_argument(
        "--cases", nargs="+", default=["public"], help="folders that hold a manifest.json"
    )
    ap.add_argument("--device", default="cpu", help="cpu or cuda")
    ap.add_argument("--enable", default="", help="Python run before the framework is imported")
    ap.add_argument(
        "--filter", default="", help="comma list; cases whose id, kind or family contains a word"
    )
    ap.add_argument("--json", default="", help="write the results there")
    ap.add_argument("--trace", action="store_true", help="print tracebacks")
    ap.add_argument("--quiet", action="store_true", help="print failures only")
    return ap


def enable(code: str) -> None:
    """Run the statements of `--enable`."""
    if code:
        exec(code, {"__name__": "golden_enable"})


def cases_of(folders: Iterable[str], words: str) -> list[dict[str, Any]]:
    """The entries of all manifests that `--filter` names; `path` is where an entry's arrays lie, or
    None."""
    found = []
    for folder in folders:
        with open(os.path.join(folder, "manifest.json")) as f:
            entries = json.load(f)["cases"]
        for entry in entries:
            kind = entry.get("kind") or entry["spec"]["kind"]
            texts = (entry["id"], kind, entry["family"], *entry.get("tags", []))
            if not words or any(w in text for w in words.split(",") if w for text in texts):
                file = entry.get("file")
                found.append({**entry, "path": os.path.join(folder, file) if file else None})
    return found


def replay(
    entries: Iterable[dict[str, Any]],
    judge: Callable[[dict[str, Any]], tuple[float | None, str]],
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Judge every case; one bad case does not stop the rest. A verdict is a dict each.

    judge: raises where an entry fails; else its worst error and where that is.
    """
    rows = []
    for entry in entries:
        begin, reason, worst, where = time.time(), "", None, ""
        try:
            worst, where = judge(entry)
        except Mismatch as e:
            reason = str(e) or "differs"
        except Exception as e:
            at = f" at {e.golden_at}" if hasattr(e, "golden_at") else ""
            reason = f"{type(e).__name__}{at}: {' '.join(str(e).split())[:300]}"
            if args.trace:
                traceback.print_exc()
        row = {"id": entry["id"], "family": entry["family"], "ok": not reason, "reason": reason}
        rows.append(
            {**row, "worst": worst, "where": where, "seconds": round(time.time() - begin, 4)}
        )
        if reason:
            print(f"FAIL {entry['id']:<44} {reason}", flush=True)
        elif not args.quiet:
            print(f"PASS {entry['id']:<44} {worst or 0:.1e} {where}", flush=True)
    return rows


def finish(rows: list[dict[str, Any]], args: argparse.Namespace, **facts: Any) -> int:
    """Print the counts by family, write `--json`, and return the exit status."""
    families: dict[str, list[int]] = {}
    for row in rows:
        families.setdefault(row["family"], [0, 0])[0 if row["ok"] else 1] += 1
    for family, (good, bad) in families.items():
        print(f"  {family:<14} {good:>3} passed {bad:>3} failed")
    passed = sum(row["ok"] for row in rows)
    print(f"{passed} passed, {len(rows) - passed} failed")
    if args.json:
        counts = {"device": args.device, "passed": passed, "failed": len(rows) - passed}
        with open(args.json, "w") as f:
            json.dump({**facts, **counts, "cases": rows}, f, indent=1)
    return 0 if rows and passed == len(rows) else 1


if __name__ == "__main__":
    sys.exit("run tests/goldens/<framework>/run_golden.py")
