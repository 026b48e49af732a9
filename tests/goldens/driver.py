"""The command line of the recorded answers: options, the loop over cases, the verdict.

A framework's `run_golden.py` holds its dialect and calls `main`. Numpy and torch are needed, no
more.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from tests.goldens.compare import Mismatch, Report
from tests.goldens.interpreter import Case

__all__ = ["cases_of", "enable", "finish", "judge", "load_arrays", "main", "parser", "public", "replay"]


def load_arrays(path: str | None) -> dict[str, np.ndarray]:
    """All arrays of an .npz file. Those stored as float16, which lost nothing, are float32."""
    if path is None:
        return {}
    with np.load(path, allow_pickle=False) as z:
        arrays = {k: z[k] for k in z.files}
    return {k: v.astype(np.float32) if v.dtype == np.float16 else v for k, v in arrays.items()}


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every framework has."""
    ap = argparse.ArgumentParser(description=description.splitlines()[0], allow_abbrev=False)
    add = ap.add_argument
    add("--cases", nargs="+", default=["public"], help="folders that hold a manifest.json")
    add("--device", default="cpu", help="cpu or cuda")
    add("--enable", default="", help="Python run before the framework is imported")
    add("--module", default="", help="import name of the library under test, if not its own")
    add("--filter", default="", help="comma list; cases whose id, kind or family contains a word")
    add("--exact", default="", help="the one case of this id")
    add("--source", help="the cases whose answers come from there")
    add("--tol", type=float, help="one tolerance for all cases")
    add("--double", action="store_true", help="run in float64, for reference implementations")
    add("--threads", type=int, help="torch threads; 0 keeps torch's choice")
    add("--isolate", action="store_true", help="run every case in its own process")
    add("--timeout", type=float, default=300, help="seconds per isolated case")
    add("--list", action="store_true", help="print the cases and stop")
    add("--json", default="", help="write the results there")
    add("--trace", action="store_true", help="print tracebacks")
    add("--quiet", action="store_true", help="print failures only")
    return ap


def enable(code: str) -> None:
    """Run the statements of `--enable`."""
    if code:
        exec(code, {"__name__": "golden_enable"})


def cases_of(folders: Iterable[str], words: str = "", exact: str = "") -> list[dict[str, Any]]:
    """The entries of all manifests that `--filter` and `--exact` name; `path` is where an entry's
    arrays lie, or None."""
    found = []
    for folder in folders:
        with open(os.path.join(folder, "manifest.json")) as f:
            entries = json.load(f)["cases"]
        for entry in entries:
            kind = entry.get("kind") or entry["spec"]["kind"]
            texts = (entry["id"], kind, entry["family"], *entry.get("tags", []))
            named = not words or any(w in text for w in words.split(",") if w for text in texts)
            if named and exact in ("", entry["id"]):
                file = entry.get("file")
                found.append({**entry, "path": os.path.join(folder, file) if file else None})
    return found


def public(framework: str) -> list[dict[str, Any]]:
    """The entries that lie beside a dialect, by the name of its folder."""
    return cases_of([os.path.join(os.path.dirname(os.path.abspath(__file__)), framework, "public")])


def judge(dialect: type[Case], entry: dict[str, Any], **options: Any) -> Report:
    """Run one case and compare it. The options are those of `Case`."""
    return dialect(entry, load_arrays(entry["path"]), **options).judge()


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
        rows.append({**row, "worst": worst, "where": where, "seconds": round(time.time() - begin, 4)})
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


def isolated(entry: dict[str, Any], argv: list[str], args: argparse.Namespace) -> tuple[float | None, str]:
    """One case in its own process, so that a crash of the library is only one failure."""
    with tempfile.TemporaryDirectory() as folder:
        result = os.path.join(folder, "result.json")
        same = [a for a in argv if a != "--isolate"]
        command = [sys.executable, os.path.abspath(sys.argv[0]), *same]
        command += ["--exact", entry["id"], "--json", result]
        try:
            p = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout)
        except subprocess.TimeoutExpired:
            raise Mismatch(f"no answer after {args.timeout} s") from None
        if not os.path.exists(result):
            last = (p.stderr.strip().splitlines() or [""])[-1]
            raise Mismatch(f"process ended with status {p.returncode}: {last}")
        with open(result) as f:
            (case,) = json.load(f)["cases"]
    if not case["ok"]:
        raise Mismatch(case["reason"])
    return case["worst"], case["where"]


def main(dialect: type[Case], description: str, argv: list[str] | None = None) -> int:
    """Replay the recorded cases of a framework; the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    ap = parser(description)
    dialect.options(ap)
    args = ap.parse_args(argv)
    warnings.simplefilter("ignore")
    entries = [
        chosen
        for entry in cases_of(args.cases, args.filter, args.exact)
        if (chosen := dialect.select(entry, args)) is not None
    ]
    if args.list:
        for e in entries:
            print(f"{e['id']:<48} {e['family']:<14} {e.get('source', ''):<9} {e.get('about', '')}")
        return 0
    if args.isolate:
        rows = replay(entries, lambda entry: isolated(entry, argv, args), args)
        return finish(rows, args, torch=torch.__version__)
    threads = dialect.threads if args.threads is None else args.threads
    if threads:
        torch.set_num_threads(threads)
    enable(args.enable)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    dialect.begin(args)

    def judged(entry: dict[str, Any]) -> tuple[float | None, str]:
        dtype = torch.float64 if args.double else torch.float32
        report = judge(dialect, entry, device=args.device, dtype=dtype, tolerance=args.tol, module=args.module)
        return report.worst, report.where

    rows = replay(entries, judged, args)
    module = args.module or dialect.framework
    file = getattr(sys.modules.get(module), "__file__", None)
    return finish(rows, args, module=module, file=file, torch=torch.__version__)


if __name__ == "__main__":
    sys.exit("run tests/goldens/<framework>/run_golden.py")
