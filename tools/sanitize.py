"""NVIDIA's compute-sanitizer over the list of layers, on a GPU machine:

    python tools/sanitize.py --json docs/proofs/sanitizer.json

runs memcheck, racecheck, initcheck and synccheck, each over every layer of `LAYERS`, forward and
backward, in a process of its own, and exits with 1 if one of them finds something. The tool comes
with the CUDA toolkit, or with `pip install nvidia-cuda-sanitizer-api`.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from sparse_bridge import __version__, settings
from sparse_bridge.core import functional
from sparse_bridge.core.conv import depthwise
from sparse_bridge.core.ops import batch_norm
from sparse_bridge.tools.acceptance.kernels import build, cloud

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
KINDS = ("submanifold", "strided", "inverse", "generative", "between")
DTYPES = {
    "fp16": (torch.float16, False),
    "bf16": (torch.bfloat16, False),
    "fp32": (torch.float32, False),
    "tf32": (torch.float32, True),
}
FLOWS = ("unmasked", "grouped", "masked:2")
ROWS = 1500
# Nothing but the layer runs: no warm-up beside it, no comparison, no graph. Memory that is not
# cached is seen when it is read before it is written, or behind its end.
QUIET = {
    "SPARSE_BRIDGE_STARTUP": "warmup=0,self_check=0",
    "SPARSE_BRIDGE_CAPTURE": "off",
    "SPARSE_BRIDGE_TUNE": "off",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
}
# Errors of memcheck, initcheck and synccheck; hazards of racecheck.
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")
FOUND = 9  # exit status by which the tool says that it found something
Run = Callable[[torch.device], object]


def _values(rows: int, channels: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(rows, channels).to(device, dtype).requires_grad_()


def _convolution(kind: str, name: str, flow: str = "auto", repeats: bool = False) -> Run:
    """Forward, with bias and a norm's end behind it, and backward."""
    dtype, tf32 = DTYPES[name]

    def run(device: torch.device) -> None:
        kmap = build(kind, cloud(ROWS, repeats=repeats).to(device))[1]
        for c_in, c_out in ((4, 16), (32, 64), (17, 33), (128, 128)):
            x = _values(kmap.n_in, c_in, dtype, device)
            weight = torch.randn(kmap.n_offsets, c_in, c_out).to(device, dtype).requires_grad_()
            bias = torch.zeros(c_out, device=device, dtype=dtype, requires_grad=True)
            functional.conv(x, weight, bias, kmap, allow_tf32=tf32).sum().backward()
            with torch.no_grad():
                functional.conv(x, weight, bias, kmap, activation="relu", allow_tf32=tf32)

    def forced(device: torch.device) -> None:
        with settings.override(dataflow=flow):
            run(device)

    return run if flow == "auto" else forced


def _maps(far: bool, repeats: bool) -> Run:
    def run(device: torch.device) -> None:
        for kind in KINDS:
            kmap = build(kind, cloud(ROWS, far, repeats).to(device), far)[1]
            kmap.pair_list(0)

    return run


def _pools(device: torch.device) -> None:
    coords = cloud(ROWS).to(device)
    kmap = build("strided", coords)[1]
    for mode in ("max", "avg", "sum"):
        x = _values(ROWS, 24, torch.float16, device)
        functional.pool(x, kmap, mode).sum().backward()
        functional.global_pool(x, coords[:, 0], 2, mode).sum().backward()


def _depthwise(device: torch.device) -> None:
    kmap = build("submanifold", cloud(ROWS).to(device))[1]
    x = _values(ROWS, 40, torch.float32, device)
    weight = _values(kmap.n_offsets, 40, torch.float32, device)
    depthwise.channelwise(x, weight, kmap).sum().backward()


def _norms(device: torch.device) -> None:
    for dtype in (torch.float16, torch.float32):
        x, norm = _values(ROWS, 48, dtype, device), torch.nn.BatchNorm1d(48).to(device)
        vectors = norm.weight, norm.bias, norm.running_mean, norm.running_var, None
        batch_norm.batch_norm(x, vectors, momentum=0.1, eps=1e-5, relu=True).sum().backward()


LAYERS: dict[str, Run] = {
    "maps, 32-bit keys": _maps(False, False),
    "maps, 64-bit keys": _maps(True, False),
    "maps, repeated coordinates": _maps(False, True),
    **{
        f"{kind}, {name}": _convolution(kind, name)
        for kind in KINDS
        for name in (DTYPES if kind == "submanifold" else ("fp16", "fp32"))
    },
    **{f"strided, fp16, {flow}": _convolution("strided", "fp16", flow) for flow in FLOWS},
    "submanifold, fp16, repeated coordinates": _convolution("submanifold", "fp16", repeats=True),
    "pools": _pools,
    "depthwise": _depthwise,
    "norms": _norms,
}


def examine(tool: str, layer: str, program: str, device: str) -> dict[str, Any]:
    """One tool over one layer: how many errors or hazards it counts; None where it did not get to
    its summary, which is a failure, too."""
    begin = time.perf_counter()
    words = [program, "--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "all"]
    words += [sys.executable, __file__, "--layer", layer, "--device", device]
    done = subprocess.run(words, env={**os.environ, **QUIET}, capture_output=True, text=True)
    text = done.stdout + done.stderr
    counts = [int(number) for number in SUMMARY.findall(text)]
    answer = {
        "tool": tool,
        "layer": layer,
        "found": sum(counts) if counts else None,
        "status": done.returncode,
        "seconds": round(time.perf_counter() - begin, 1),
    }
    clean = done.returncode == 0 and answer["found"] == 0
    return answer if clean else {**answer, "said": text[-4000:]}


def failed(answer: dict[str, Any]) -> bool:
    return "said" in answer


def record(answers: list[dict[str, Any]], program: str, device: str) -> dict[str, Any]:
    """The results with what they were taken on."""
    version = subprocess.run([program, "--version"], capture_output=True, text=True)
    name = torch.cuda.get_device_name(device) if device != "cpu" else "CPU"
    return {
        "device": name,
        "sparse_bridge": __version__,
        "torch": torch.__version__,
        "sanitizer": version.stdout.strip().splitlines()[-1:],
        "rows": ROWS,
        "answers": answers,
        "failed": sum(map(failed, answers)),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tool", action="append", choices=TOOLS, help="default: all four")
    parser.add_argument("--layer", action="append", choices=LAYERS, metavar="NAME", help="default: all")
    parser.add_argument("--program", default="compute-sanitizer", help="the tool, by path or name")
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time; default: 1")
    parser.add_argument("--json", type=pathlib.Path, metavar="PATH", help="write the record there")
    parser.add_argument("--list", action="store_true", help="name the layers")
    args = parser.parse_args(arguments)
    if args.list:
        print("\n".join(LAYERS))
        return 0
    if args.layer and not args.tool:  # the process under the tool
        for name in args.layer:
            LAYERS[name](torch.device(args.device))
        return 0
    program = shutil.which(args.program)
    if program is None:
        print(f"{args.program} is not here: CUDA's toolkit brings it", file=sys.stderr)
        return 2
    answers = []
    pairs = [(tool, layer) for tool in args.tool or TOOLS for layer in args.layer or LAYERS]
    with ThreadPoolExecutor(args.jobs) as pool:
        for last in pool.map(lambda pair: examine(*pair, program, args.device), pairs):
            answers.append(last)
            words = f"found {last['found']}" if failed(last) else "nothing found"
            print(f"{last['tool']:10} {last['layer']:42} {words}, {last['seconds']} s", flush=True)
    if args.json:
        args.json.write_text(json.dumps(record(answers, program, args.device), indent=1) + "\n")
    return int(any(map(failed, answers)))


if __name__ == "__main__":
    sys.exit(main())
