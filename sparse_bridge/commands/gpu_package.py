"""What `python -m sparse_bridge package --target` does: write a network as a folder that a C program runs on a GPU."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from .. import export
from ..adapters import protocol
from ..export import package_check
from ..tools.harness.progress import Progress
from .package import Example, example_of, show


def run(args: argparse.Namespace, most: int, rows: Sequence[int]) -> int:
    """most: rows of an input.  rows: of scenes. Raises what `export_gpu_package` does."""
    import sparse_bridge

    targets = list(dict.fromkeys(args.target))
    with Progress(1 + args.check) as progress, sparse_bridge.enable():
        progress.start(f"make {args.model}")
        model, inputs, scenes = _cast(example_of(args, rows), args.dtype)
        progress.start(f"record and compile {args.model} for {', '.join(targets)}")
        programs = export.export_gpu_package(model, inputs, args.out, targets=targets, rows=most, scenes=scenes)
        progress.done()
        progress.start("build the example with CMake, run it")
        ran = package_check.check(args.out, repeat=5) if args.check else None
    if args.json:
        facts = [
            {"target": it.target, "memory": it.memory, "steps": len(it.steps), "kernels": len(it.kernels)}
            for it in programs
        ]
        scenes_run = None if ran is None else [scene._asdict() for scene in ran]
        sys.stdout.write(json.dumps({"folder": str(args.out), "targets": facts, "scenes": scenes_run}) + "\n")
        return 0
    sys.stdout.write(f"{args.out}: model.sbp with its player, an example and scenes, see README.md\n")
    for it in programs:
        memory, n_steps, n_kernels = it.memory / (1 << 20), len(it.steps), len(it.kernels)
        sys.stdout.write(f"  {it.target}: {memory:.0f} MiB for {most} rows, {n_steps} steps, {n_kernels} kernels\n")
    show(ran)
    return 0


def _cast(example: Example, name: str | None) -> Example:
    """The same in another dtype."""
    model, inputs, scenes = example
    if name is None:
        return example
    dtype: torch.dtype = getattr(torch, name)
    casts = [tuple(_as_dtype(value, dtype) for value in scene) for scene in (inputs, *scenes)]
    return model.to(dtype), casts[0], casts[1:]


def _as_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Features in a dtype, and a sparse tensor with such features."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    framework = protocol.of(value)
    features = None if framework is None else framework.features_of(value)
    return value if framework is None or features is None else framework.with_features(value, features.to(dtype))
