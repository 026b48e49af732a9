"""Layers and networks on a GPU, library against library in one run.

    python -m benchmarks.gpu --peers spconv bridge --scans scan.npz --markdown figures.md

Every library runs in a process of its own, one after the other. Ratios are relative to the first
one named: below 1 is faster (or smaller) than it. The spread is the 10 % to 90 % range over the
repetitions.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

LAYER_CHANNELS = (16, 32, 64, 128, 256)
SHELLS = ((16, 1024), (32, 1024), (64, 1024), (128, 512), (256, 256), (512, 128), (1024, 64))


def measure(peer, networks, layers, dtype, seconds, progress):
    """(versions, rows) of one library; a library that fails keeps the rows it has delivered."""
    command = [sys.executable, "-m", "benchmarks.gpu_peer", "--peer", peer, "--dtype", dtype]
    command += ["--seconds", str(seconds), "--networks", *networks, "--layers", *layers]
    task = progress.add_task(f"{peer}, {dtype}", total=2 * len(networks) + 3 * len(layers))
    rows, versions = [], {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        for line in child.stdout:
            if not line.startswith("{"):
                continue
            row = json.loads(line)
            if "versions" in row:
                versions = row["versions"]
            else:
                rows.append({"peer": peer, **row})
                progress.advance(task)
    if child.returncode:
        progress.console.print(f"[red]{peer} stopped with exit status {child.returncode}")
    return versions, rows


def markdown(title, peers, rows):
    """One table: per case and work the first library's time, then every other one's ratio to it."""
    found = {(r["case"], r["dtype"], r["work"], r["peer"]): r for r in rows}
    keys = list(dict.fromkeys((r["case"], r["dtype"], r["work"], r["rows"]) for r in rows))
    base, *others = peers
    head = ["case", "voxels", "dtype", "work", f"{base} ms", f"{base} MB"]
    for peer in others:
        head += [f"{peer} ms", f"{peer} / {base}", f"{peer} MB", f"MB {peer} / {base}"]
    lines = [title, "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for case, dtype, work, n_rows in keys:
        first = found.get((case, dtype, work, base))
        cells = [case, str(n_rows), dtype, work, *_own(first)]
        for peer in others:
            row = found.get((case, dtype, work, peer))
            ms, mb = _own(row)
            cells += [ms, _ratio(row, first, "ms"), mb, _ratio(row, first, "peak_mb")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _own(row):
    if row is None:
        return "-", "-"
    return f"{row['ms']:.3f} ({row['low']:.3f} .. {row['high']:.3f})", f"{row['peak_mb']:.0f}"


def _ratio(row, first, field):
    if row is None or first is None or not first[field]:
        return "-"
    return f"{row[field] / first[field]:.2f}"


def title_of(versions):
    parts = []
    for peer, found in versions.items():
        parts.append(f"{peer}: " + ", ".join(f"{k} {v}" for k, v in found.items()))
    command = " ".join(["python -m benchmarks.gpu", *(Path(a).name for a in sys.argv[1:])])
    return "; ".join(parts) + f". Command: `{command}`"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peers", nargs="+", default=["spconv", "bridge"])
    parser.add_argument("--scans", nargs="+", default=["street"], help="street or .npz paths")
    parser.add_argument("--batches", nargs="+", default=["1", "4"])
    parser.add_argument("--networks", nargs="*", default=["second", "unet"])
    parser.add_argument("--channels", nargs="*", default=list(map(str, LAYER_CHANNELS)))
    parser.add_argument("--shells", action="store_true", help="add the spherical shells")
    parser.add_argument("--dtypes", nargs="+", default=["fp16"])
    parser.add_argument("--seconds", type=float, default=1.0, help="time for one figure")
    parser.add_argument("--json")
    parser.add_argument("--markdown")
    args = parser.parse_args(argv)
    places = [f"{scan}@{batch}" for scan in args.scans for batch in args.batches]
    networks = [f"{name}@{place}" for place in places for name in args.networks]
    layers = [f"{c}@{place}" for place in places for c in args.channels]
    if args.shells:
        layers += [f"{c}@shell:{res}@1" for res, c in SHELLS]
    versions, rows = {}, []
    with Progress(console=Console(stderr=True)) as progress:
        for dtype in args.dtypes:
            for peer in args.peers:
                versions[peer], found = measure(
                    peer, networks, layers, dtype, args.seconds, progress
                )
                rows += found
    text = markdown(title_of(versions), args.peers, rows)
    print(text)
    if args.markdown:
        Path(args.markdown).write_text(text)
    if args.json:
        Path(args.json).write_text(json.dumps({"versions": versions, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
