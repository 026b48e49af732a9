"""What the examples share around the model: options, progress, and what they leave behind."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

console = Console()


def parse(description: str, name: str, steps: int) -> argparse.Namespace:
    """The options that every example has; `args.device` and `args.out` are ready to use."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, metavar="N", help=f"training steps (default: {steps})")
    parser.add_argument("--seed", type=int, default=0, help="of weights, data and their order")
    parser.add_argument("--quick", action="store_true", help="a coarse, short run: a smoke test")
    parser.add_argument(
        "--out", type=Path, default=Path("examples_out"), metavar="DIR", help="default: %(default)s"
    )
    args = parser.parse_args()
    if args.steps is None:
        args.steps = max(steps // 8, 1) if args.quick else steps
    try:
        args.device = torch.empty(0, device=args.device).device
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device {args.device}: {str(error).splitlines()[0]}")
    args.picture = args.out / f"{name}.png"
    torch.manual_seed(args.seed)
    return args


def training(steps: int, shown: bool = True) -> Iterator[tuple[int, Callable[[float], None]]]:
    """Count `steps` on a progress bar: yields the step and a function that shows the loss."""
    bar = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not shown,
    )
    with bar:
        task = bar.add_task("", total=steps, loss="")
        for step in range(steps):
            yield step, lambda loss: bar.update(task, loss=f"loss {float(loss):.3f}")
            bar.advance(task)


def finish(args: argparse.Namespace, metrics: dict[str, tuple[float, float]]) -> None:
    """Print what training changed, and write it next to the picture as JSON."""
    table = Table("", "before training", "after training")
    for name, (before, after) in metrics.items():
        table.add_row(name, f"{before:.3f}", f"{after:.3f}")
    console.print(table)
    written = args.picture.with_suffix(".json")
    written.write_text(json.dumps({k: list(map(float, v)) for k, v in metrics.items()}, indent=1))
    console.print("picture:", str(args.picture), markup=False, soft_wrap=True)
