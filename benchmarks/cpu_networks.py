"""Whole networks on the CPU: the installed spconv, native and bridged, turn by turn in one process.

    python -m benchmarks.cpu_networks --scan scan.npz --threads 1 2

Each round runs native and bridged one after the other on the same module, weights and input, and
every kernel map is built anew. The ratio is native / bridged per round: above 1 the bridge is
faster. spconv's CPU convolutions race with more than one thread and then return some wrong rows;
their times are still comparable.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import sparse_bridge

from .models import NETWORKS, network_input
from .workloads import load


def native_backward_works() -> None:
    """The wheel's CPU kernels ask for a CUDA stream handle in backward and never use it."""
    for name, module in list(sys.modules.items()):
        if name.startswith("spconv") and hasattr(module, "get_current_stream"):
            module.get_current_stream = lambda: 0


def make_run(sp, name, scan, train):
    torch.manual_seed(0)
    model = NETWORKS[name](sp).train()
    coords, shape = network_input(name, scan)

    def infer():
        with torch.no_grad():
            return model(
                sp.SparseConvTensor(scan.feats, coords, list(shape), scan.batch_size)
            ).features

    def step():
        model.zero_grad()
        out = model(sp.SparseConvTensor(scan.feats, coords, list(shape), scan.batch_size)).features
        out.square().mean().backward()
        return out

    return step if train else infer


def timed(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def compare(sp, name, scan, train, rounds, label):
    """Seconds of each round, native and bridged, in alternation; the first of each is a warm-up."""
    run = make_run(sp, name, scan, train)
    native, bridged = [], []
    for index in track(range(rounds + 1), label, console=Console(stderr=True), transient=True):
        first = timed(run)
        with sparse_bridge.enable("spconv", mode="patch"):
            second = timed(run)
        if index:
            native.append(first)
            bridged.append(second)
    return native, bridged


def summary(native, bridged):
    ratios = sorted(a / b for a, b in zip(native, bridged, strict=True))
    return {
        "native_s": statistics.median(native), "bridged_s": statistics.median(bridged),
        "ratio": statistics.median(ratios), "low": ratios[0], "high": ratios[-1],
    }  # fmt: skip


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--scan", default="street", help="street, shell:RES or an .npz path")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args(argv)
    import spconv
    import spconv.pytorch as sp

    native_backward_works()
    scan = load(args.scan)
    title = (
        f"{scan.name}, {len(scan.coords)} voxels, fp32; spconv {spconv.__version__} CPU wheel, "
        "torch "
        f"{torch.__version__}, Python {platform.python_version()}, {platform.machine()}"
    )
    table = Table(
        "threads",
        "network",
        "run",
        "native s",
        "bridged s",
        "native / bridged",
        "lowest .. highest",
        title=title,
    )
    rows = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        for name in args.networks:
            for train in (False, True):
                kind = "train" if train else "infer"
                label = f"{threads} threads, {name}, {kind}"
                row = summary(*compare(sp, name, scan, train, args.rounds, label))
                rows.append(
                    {"scan": scan.name, "threads": threads, "network": name, "run": kind, **row}
                )
                table.add_row(
                    str(threads), name, kind, f"{row['native_s']:.3f}", f"{row['bridged_s']:.3f}",
                    f"{row['ratio']:.2f}", f"{row['low']:.2f} .. {row['high']:.2f}",
                )  # fmt: skip
    Console().print(table)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"title": title, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
