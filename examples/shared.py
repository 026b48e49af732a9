"""What the examples share around the model: options, progress, and what they leave behind."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

console = Console()


def parse(
    description: str, name: str, steps: int, quick: int, public_steps: int = 0
) -> argparse.Namespace:
    """The options that every example has; `args.device` and `args.out` are ready to use.

    `steps`, `quick`: training steps, by default and of a smoke test; `public_steps`: by default of
    the public model, where it needs others.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, metavar="N", help=f"training steps (default: {steps})")
    parser.add_argument("--seed", type=int, default=0, help="of weights, data and their order")
    parser.add_argument(
        "--model",
        choices=("small", "public"),
        default="small",
        help="a small network, or the definition of a public project (needs the source checkout)",
    )
    parser.add_argument("--quick", action="store_true", help="a coarse, short run: a smoke test")
    parser.add_argument(
        "--out", type=Path, default=Path("examples_out"), metavar="DIR", help="default: %(default)s"
    )
    args = parser.parse_args()
    if args.steps is None:
        usual = public_steps or steps if args.model == "public" else steps
        args.steps = quick if args.quick else usual
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


def public(name: str) -> ModuleType:
    """A network of `compat/models` as its project defines it, such as "spconv.second"."""
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    return importlib.import_module(f"compat.models.{name}")


@torch.no_grad()
def precise_norms(model: nn.Module, forward: Callable[[], object], passes: int = 8) -> None:
    """Average the statistics of all batch norms over `passes` calls of `forward`.

    Projects that train for days let them decay slowly; a short run leaves them far behind.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # average instead of decay
    for _ in range(passes):
        forward()
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def finish(args: argparse.Namespace, metrics: dict[str, tuple[float, float]]) -> None:
    """Print what training changed, and write it next to the picture as JSON.

    NaN, for what cannot be measured, becomes "-" and null.
    """
    table = Table("", "before training", "after training")
    for name, values in metrics.items():
        table.add_row(name, *("-" if math.isnan(value) else f"{value:.3f}" for value in values))
    console.print(table)
    known = {
        name: [None if math.isnan(value) else float(value) for value in values]
        for name, values in metrics.items()
    }
    args.picture.with_suffix(".json").write_text(json.dumps(known, indent=1))
    console.print("picture:", str(args.picture), markup=False, soft_wrap=True)
