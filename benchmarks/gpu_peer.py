"""Measures one library on one GPU, as a process of its own: `python -m benchmarks.gpu_peer --peer
bridge ...`.

Prints one JSON object per line. `benchmarks.gpu` starts it once per library and compares. Times are
medians over repetitions, in ms, host time included; each comes with its 10 % and 90 % quantiles.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import time

import torch

from .models import NETWORKS, network_input
from .workloads import load

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
MODULES = {
    "spconv": "spconv.pytorch",
    "spconv_triton": "spconv_triton.pytorch",
    "bridge": "spconv.pytorch",
}
MB = 1 << 20


def library(peer):
    """The module with spconv's names. `bridge` replaces an installed spconv by the stand-in."""
    if peer == "bridge":
        import sparse_bridge

        sparse_bridge.enable("spconv", mode="standin")
    return importlib.import_module(MODULES[peer])


def versions(peer):
    found = {"torch": torch.__version__, "python": platform.python_version()}
    found["gpu"] = torch.cuda.get_device_name()
    for name in ("triton", "spconv" if peer == "spconv" else "sparse_bridge"):
        found[name] = getattr(importlib.import_module(name), "__version__", "?")
    return found


def timed(function, seconds, most=60):
    """(median, 10 % quantile, 90 % quantile) in ms of calls that end with the device idle."""
    for _ in range(4):
        function()
    torch.cuda.synchronize()
    times, begin = [], time.perf_counter()
    while len(times) < most and (len(times) < 8 or time.perf_counter() - begin < seconds):
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    times.sort()
    return [times[len(times) * share // 100] for share in (50, 10, 90)]


def peak_mb(function):
    """MB that `function` needs on top of what is allocated."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    function()
    return (torch.cuda.max_memory_allocated() - base) / MB


def layer_rows(sp, scan, channels, dtype, seconds):
    """One submanifold 3x3x3 layer: cached map, fresh map, and forward + backward with a cached
    map."""
    coords, shape = scan.coords, list(scan.shape)
    layer = sp.SubMConv3d(channels, channels, 3, bias=True, indice_key="k").cuda().to(dtype)
    feats = torch.randn(len(coords), channels, device="cuda", dtype=dtype)
    dy = torch.randn_like(feats)

    def fresh():
        return layer(sp.SparseConvTensor(feats, coords.clone(), shape, scan.batch_size)).features

    with torch.no_grad():
        kept = layer(sp.SparseConvTensor(feats, coords, shape, scan.batch_size)).indice_dict

    def cached():
        x = sp.SparseConvTensor(feats, coords, shape, scan.batch_size)
        x.indice_dict = dict(kept)
        return layer(x).features

    def train():
        feats.grad = None
        layer.zero_grad(set_to_none=True)
        cached().backward(dy)

    with torch.no_grad():
        yield "forward", timed(cached, seconds), peak_mb(cached)
        yield "fresh map + forward", timed(fresh, seconds), peak_mb(fresh)
    feats.requires_grad_(True)
    with torch.no_grad():
        kept = layer(sp.SparseConvTensor(feats, coords, shape, scan.batch_size)).indice_dict
    yield "forward + backward", timed(train, seconds), peak_mb(train)


def network_rows(sp, name, scan, dtype, seconds):
    """A whole network on fresh maps: inference, then a training step under autocast; first calls in
    seconds."""
    coords, shape = network_input(name, scan)
    torch.manual_seed(0)
    model = NETWORKS[name](sp).cuda().eval().to(dtype)
    half = scan.feats.to(dtype)

    def run(feats):
        x = sp.SparseConvTensor(feats, coords.clone(), list(shape), scan.batch_size)
        return model(x).features

    def infer():
        with torch.no_grad():
            return run(half)

    start = time.perf_counter()
    infer()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    yield "inference", timed(infer, seconds), peak_mb(infer), first
    model.float().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            y = run(scan.feats)
        scaler.scale(y.float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    yield "training step", timed(step, seconds), peak_mb(step), first


def emit(case, work, ms, peak, **more):
    row = {**case, "work": work, "ms": ms[0], "low": ms[1], "high": ms[2], "peak_mb": peak, **more}
    print(json.dumps(row), flush=True)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer", choices=MODULES, required=True)
    parser.add_argument("--networks", nargs="*", default=[], help="network@scan@batch")
    parser.add_argument("--layers", nargs="*", default=[], help="channels@scan@batch")
    parser.add_argument("--dtype", choices=DTYPES, default="fp16")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for one figure")
    args = parser.parse_args(argv)
    dtype = DTYPES[args.dtype]
    sp = library(args.peer)
    print(json.dumps({"versions": versions(args.peer)}), flush=True)
    for spec in args.networks:
        name, source, batch = spec.split("@")
        scan = load(source, int(batch)).to("cuda")
        case = {
            "case": f"{name}, {scan.name} x {batch}",
            "rows": len(scan.coords),
            "dtype": args.dtype,
        }
        for work, ms, peak, first in network_rows(sp, name, scan, dtype, args.seconds):
            emit(case, work, ms, peak, first_s=first)
    for spec in args.layers:
        channels, source, batch = spec.split("@")
        scan = load(source, int(batch)).to("cuda")
        case = {
            "case": f"C = {channels}, {scan.name} x {batch}",
            "rows": len(scan.coords),
            "dtype": args.dtype,
        }
        for work, ms, peak in layer_rows(sp, scan, int(channels), dtype, args.seconds):
            emit(case, work, ms, peak)


if __name__ == "__main__":
    main()
