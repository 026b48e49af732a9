"""Which modules of the models of the matrix may be replayed from graphs, as far as a CPU can tell:

    python -m compat.replays

runs every model on the CPU, over scenes as small as it takes them, with the package's own search for modules to
replay. Each module that it finds is watched, and its arguments are looked at, as before a capture. Nothing is
captured, so that the trial over a padded input, which may refuse as well, is left out. The outcome is written to
`compat/results/replays/cpu.json`, and docs/compatibility.md with it.

    python -m compat.replays --device cuda --jobs 12 --json compat/results/replays/h200.json

has the models run on a GPU with default settings over scenes of about 2,400 voxels, and says which modules were
replayed there. Every second replay is compared with the layers.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import pathlib
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any
from unittest import mock

import torch
from torch import nn

import sparse_bridge
from sparse_bridge import policy, settings
from sparse_bridge.adapters import protocol
from sparse_bridge.core.capture import graph_key, graph_regions
from sparse_bridge.core.capture.graphed_module import GraphedModule
from sparse_bridge.errors import SettingError
from sparse_bridge.tools.harness import results as files

from . import bridged, layers, results, scenes
from .cellfile import from_json
from .matrix import Cell
from .subject import SCENES, Subject

__all__ = [
    "RECORD",
    "Audited",
    "CpuSearch",
    "GpuSearch",
    "Part",
    "ReplayAudit",
    "audited",
    "on_gpus",
    "parts_of",
    "read",
]

RECORD = pathlib.Path(__file__).with_name("results") / "replays" / "cpu.json"
SCHEMA = 1
MODES = ("inference", "training")
CALLS = 120  # at most, of a model in a mode, with the scenes of a few seeds in turn
COMPARED = 2  # of replays on a GPU, each of so many
TOGETHER = 2  # models in a process on a GPU, which others share


@dataclasses.dataclass(frozen=True)
class Part:
    """A module that was tried. path: in the model, "" for all of it.  kind: its class.  layers: with weights.
    why: it is not replayed; "" where it may be."""

    path: str
    kind: str
    layers: int
    why: str


@dataclasses.dataclass(frozen=True)
class Audited:
    """A model of the matrix. layers: with weights, of the whole model.  modes: the modules that were tried, by mode;
    a model that does not train has one mode."""

    model: str
    framework: str
    size: str
    layers: int
    modes: dict[str, tuple[Part, ...]]

    def replayed(self, mode: str) -> list[Part]:
        """The modules that may be replayed."""
        return [part for part in self.modes[mode] if not part.why]


@dataclasses.dataclass(frozen=True)
class ReplayAudit:
    """All models, and the run: machine, versions, date."""

    run: dict[str, Any]
    models: tuple[Audited, ...]

    def save(self, path: pathlib.Path) -> None:
        """Write as JSON."""
        files.save(path, SCHEMA, dataclasses.asdict(self))


def read(path: pathlib.Path = RECORD) -> ReplayAudit:
    """What `ReplayAudit.save` wrote.

    Raises:
        SettingError: the file is not such a file.
    """
    try:
        schema, values = files.read(path)
        if schema != SCHEMA:
            raise ValueError(f"schema {schema}, expected {SCHEMA}")
        return ReplayAudit(values["run"], tuple(map(_audited, values["models"])))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingError(f"{path} does not say what may be replayed: {error}; run `compat.replays`.") from None


def on_gpus(folder: pathlib.Path = RECORD.parent) -> list[ReplayAudit]:
    """The records of GPUs, the last one last.

    Raises:
        SettingError: one is no such file.
    """
    found = [read(path) for path in folder.glob("*.json") if path.name != RECORD.name]
    return sorted(found, key=lambda one: str(one.run["date"]))


def _audited(values: dict[str, Any]) -> Audited:
    modes = {mode: tuple(Part(**part) for part in parts) for mode, parts in values.pop("modes").items()}
    return Audited(**values, modes=modes)


class GpuSearch:
    """Replays, as by default on a GPU."""

    replays = True
    settled = COMPARED * (policy.REPLAYS_SETTLED + 2)  # calls in a row that changed nothing; one may yet be slower

    def __enter__(self) -> GpuSearch:
        graph_regions.remove()
        with contextlib.ExitStack() as stack:
            stack.enter_context(settings.override(optimize="auto", compare_every=COMPARED))
            stack.callback(graph_regions.remove)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def tried(self) -> dict[nn.Module, str | None]:
        """Modules with why they are not replayed; "" where they are, None where that is not known yet."""
        return {
            module: found if isinstance(found, str) else "" if found.mode().hits else None
            for module, found in graph_regions.tried()
        }

    def declined(self) -> dict[nn.Module, str]:
        """Why the last call of a module was left alone, of those that still wait."""
        waiting = ((module, found) for module, found in graph_regions.tried() if not isinstance(found, str))
        return {module: found.mode().why() or "no two of its calls are of one kind" for module, found in waiting}


class CpuSearch(GpuSearch):
    """The search for modules to replay, over CPU tensors, up to where a capture would be next."""

    replays = False
    settled = 2

    def __init__(self) -> None:
        self.closed: dict[nn.Module, int] = {}  # calls in which a module would have been captured

    def __enter__(self) -> CpuSearch:
        def due(replayer: GraphedModule, *_: Any) -> None:
            self.closed[replayer.model] = self.closed.get(replayer.model, 0) + 1

        graph_regions.remove()
        with contextlib.ExitStack() as stack:
            stack.enter_context(settings.override(optimize="graphs"))
            stack.callback(graph_regions.remove)
            patch = mock.patch.object
            stack.enter_context(patch(graph_regions, "kernel_target", lambda device: device))
            stack.enter_context(patch(graph_key, "why_not_capturable", lambda features: None))
            stack.enter_context(patch(policy, "CAPTURE", policy.Schedule()))  # every call is watched
            stack.enter_context(patch(GraphedModule, "record", due))
            self._stack = stack.pop_all()
        return self

    def tried(self) -> dict[nn.Module, str | None]:
        """Modules with why they are not replayed; "" where they may be, None where that is not known yet."""
        found: dict[nn.Module, str | None] = {}
        for module, replayer in graph_regions.tried():
            found[module] = replayer if isinstance(replayer, str) else None
            if module in self.closed:
                found[module] = found[module] or ""
        return found


def parts_of(subject: Subject, train: bool, search: GpuSearch) -> tuple[Part, ...]:
    """The modules of a model that are tried in a mode, from the outermost one."""
    network = subject.network().train(train)
    paths = {module: path for path, module in network.named_modules()}
    before, settled = None, 0
    with search, torch.set_grad_enabled(train):
        for seed in range(CALLS):
            _call(network, subject, seed % SCENES, train and search.replays)
            found = search.tried()
            settled = settled + 1 if found == before and None not in found.values() else 0
            before = found
            if settled >= search.settled:
                break
        reasons = search.declined()
    rows = [
        Part(paths[module], type(module).__name__, protocol.n_layers(module), reasons[module] if why is None else why)
        for module, why in found.items()
    ]
    return tuple(sorted(rows, key=lambda part: (part.path.count(".") + bool(part.path), part.path)))


def _call(network: nn.Module, subject: Subject, seed: int, backward: bool) -> None:
    """One call. A scene that the layers refuse as well, as the smallest ones leave one voxel at the coarsest level, or
    none, is passed over."""
    try:
        result = subject.run(network, subject.scene(seed))
        if backward:
            subject.loss(result).backward()
    except Exception as error:
        if not _refused_by_layers(network, subject, seed, type(error)):
            raise


def _refused_by_layers(network: nn.Module, subject: Subject, seed: int, error: type[Exception]) -> bool:
    with sparse_bridge.eager():
        try:
            subject.run(network, subject.scene(seed))
        except error:
            return True
    return False


def _parts_or_error(subject: Subject, train: bool, search: GpuSearch) -> tuple[Part, ...]:
    """The same; on a GPU an error of a model is a reason like others, as a run of many models has to go on."""
    try:
        return parts_of(subject, train, search)
    except Exception as error:
        if not search.replays:
            raise
        return (Part("", "", 0, f"a call raised {type(error).__name__}: {error}"),)


def audited(cell: Cell) -> Audited:
    """A model in all of its modes."""
    model = cell.model
    with bridged.enable(cell):
        subject = Subject(model, cell.device, cell.dtype, cell.size)
        n_layers = protocol.n_layers(subject.network())
        modes = MODES if model.train else MODES[:1]
        search = CpuSearch if cell.device == "cpu" else GpuSearch
        parts = {mode: _parts_or_error(subject, mode == "training", search()) for mode in modes}
    return Audited(model.name, model.framework, cell.size, n_layers, parts)


def main(arguments: Sequence[str]) -> None:
    """What of some cells may be replayed, to standard output; or of all models, to the record and the page."""
    parser = argparse.ArgumentParser(prog="python -m compat.replays", description=(__doc__ or "").split(":", 1)[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the models run")
    parser.add_argument("--size", choices=scenes.SIZES[:-1], help="of the scenes; small on a GPU, else tiny")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--model", action="append", help="whose name begins so; may be repeated; wants --json")
    parser.add_argument("--json", type=pathlib.Path, default=RECORD, help="the record to write")
    parser.add_argument("cells", nargs="?", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.model and options.json == RECORD:
        parser.error("--model without --json FILE would leave a record of these models alone")
    if options.cells:
        logging.disable(logging.WARNING)  # the record has the reasons
        found = [dataclasses.asdict(audited(cell)) for cell in map(from_json, json.loads(options.cells))]
        sys.stdout.write(json.dumps(found) + "\n")
        return
    cells = layers.cells_of(options.size or ("tiny" if options.device == "cpu" else "small"), options.device)
    if options.model:
        cells = [cell for cell in cells if cell.model.name.startswith(tuple(options.model))]
    order = [cell.model.name for cell in cells]
    run, rows = results.run_facts(options.device), []
    for row in _all(cells, options.jobs):
        rows.append(row)
        rows.sort(key=lambda row: order.index(row.model))
        ReplayAudit(run, tuple(rows)).save(options.json)  # a run that is cut off leaves what it has
    from .cli import write_stored

    write_stored()


def _all(cells: Sequence[Cell], jobs: int) -> Iterator[Audited]:
    groups = layers.together(cells)
    if jobs > 1:
        groups = [group[n : n + TOGETHER] for group in groups for n in range(0, len(group), TOGETHER)]
    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(layers.apart, "compat.replays", group) for group in groups]):
            for row in map(_audited, done.result()):
                sys.stderr.write(f"{len(row.replayed('inference')):4} {row.model}\n")
                yield row


if __name__ == "__main__":
    main(sys.argv[1:])
