"""What the examples share around the model: options, progress, and what they leave behind."""

from __future__ import annotations

import argparse
import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one training run gave: metrics by name, NaN where nothing can be measured, and how to
    draw its picture."""

    before: dict[str, float]
    after: dict[str, float]
    draw: Callable[[], None]


def parse(description: str, name: str, steps: int, quick: int, public_steps: int = 0) -> argparse.Namespace:
    """The options that every example has; `args.device` and `args.out` are ready to use.

    `steps`, `quick`: training steps, by default and of a smoke test; `public_steps`: by default of
    the public model, where it needs others.
    """
    parser = argparse.ArgumentParser(description=description)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, help="default: a GPU if there is one")
    parser.add_argument("--steps", type=int, metavar="N", help=f"training steps (default: {steps})")
    parser.add_argument("--seed", type=int, default=0, help="of weights, data and their order (default: 0)")
    parser.add_argument(
        "--seeds",
        type=int,
        default=1,
        metavar="N",
        help="train with so many seeds, from --seed on, and print the range (default: 1)",
    )
    parser.add_argument(
        "--model",
        choices=("small", "public"),
        default="small",
        help="a small network (default), or the definition of a public project",
    )
    parser.add_argument("--quick", action="store_true", help="a coarse, short run: a smoke test")
    parser.add_argument("--out", type=Path, default=Path("examples_out"), metavar="DIR", help="default: %(default)s")
    args = parser.parse_args()
    if args.seeds < 1:
        parser.error(f"--seeds {args.seeds}: expected 1 or more")
    if args.steps is None:
        usual = public_steps or steps if args.model == "public" else steps
        args.steps = quick if args.quick else usual
    try:
        args.device = torch.empty(0, device=args.device).device
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device {args.device}: {str(error).splitlines()[0]}")
    args.picture = args.out / f"{name}.png"
    return args


def over_seeds(args: argparse.Namespace, experiment: Callable[[argparse.Namespace], Outcome], data: str) -> None:
    """Run `experiment` once per seed, draw the first one, then print and keep what was measured.

    data: what it was measured on.
    """
    seeds, outcomes = list(range(args.seed, args.seed + args.seeds)), []
    for seed in seeds:
        torch.manual_seed(seed)
        args.seed = seed
        outcomes.append(experiment(args))
        if len(outcomes) == 1:
            outcomes[0].draw()
    _finish(args, seeds, outcomes, data)


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


def _finish(args: argparse.Namespace, seeds: list[int], outcomes: list[Outcome], data: str) -> None:
    """Print what training changed, the metric that counts last, and write it next to the picture
    as JSON, where NaN becomes null."""
    runs = {
        when: {name: [getattr(one, when)[name] for one in outcomes] for name in outcomes[0].after}
        for when in ("before", "after")
    }
    if len(seeds) == 1:
        spread = f"one seed ({seeds[0]}); --seeds 3 gives a range"
    else:
        spread = f"lowest to highest of seeds {', '.join(map(str, seeds))}"
    caption = f"On {data}, synthetic and not trained on.\n{spread.capitalize()}."
    table = Table("", "before training", "after training", caption=caption, caption_justify="left")
    for name in runs["after"]:
        last = name == list(runs["after"])[-1]
        style = "bold" if last else None
        table.add_row(name, *(range_of(runs[when][name]) for when in runs), style=style)
    console.print(table)
    known = {
        when: {name: [None if math.isnan(v) else float(v) for v in row] for name, row in of.items()}
        for when, of in runs.items()
    }
    text = json.dumps({"seeds": seeds, **known}, indent=1)
    args.picture.with_suffix(".json").write_text(text)
    console.print("picture:", str(args.picture), markup=False, soft_wrap=True)


def range_of(values: list[float]) -> str:
    """One number, or the lowest and the highest; "-" where there is none."""
    ends = sorted({f"{value:.3f}" for value in values if not math.isnan(value)}, key=float)
    return " to ".join(dict.fromkeys((ends[0], ends[-1]))) if ends else "-"
