"""`verify reno`: published weights of a codec write a scan and read it back."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import CoordinateError, SettingError
from ...tables import Column, Table
from . import weights

if TYPE_CHECKING:
    import torch

    from ..networks.codec import OccupancyCodec
    from .stream import Coder

NAME = "reno"
TITLE = "RENO, codec of lidar scans on torchsparse 2.1"
PRECISIONS = (12, 14)  # bits of a coordinate
TOLERANCE = 0.1  # per cent of a size; TF32 moves sizes by less
_MOST_BITS = 18  # millimetres
_ORIGIN, _UNIT = 131072, 0.001  # added to millimetres, so that a scan of a car is positive; metres
_COLUMNS = (
    Column("coordinates", True),
    Column("points", spare=3),
    Column("voxels", spare=2),
    Column("came back"),
    Column("bytes"),
    Column("bits per point", spare=4),
    Column("expected", spare=1),
    Column("verdict", True),
)


@dataclasses.dataclass(frozen=True)
class Result:
    """A scan at one precision. size: of the file, in bytes. came_back: of the voxels. extra: voxels
    that the decoder made up. fault: why it stopped."""

    bits: int
    points: int
    voxels: int
    size: int
    came_back: int
    extra: int = 0
    fault: str = ""

    @property
    def bits_per_point(self) -> float:
        return 8 * self.size / self.points

    @property
    def whole(self) -> bool:
        return self.came_back == self.voxels and not self.extra and not self.fault


def run(args: argparse.Namespace, say: Callable[[str], None]) -> int:
    """0: every voxel came back, in files of the expected sizes; 1: not.

    Raises: SettingError, ShapeError, DataTypeError, which are exit status 2.
    """
    precisions = _precisions(args.bits)
    expected = _sizes(args.expect, precisions)
    for path, option in ((args.checkpoint, "--checkpoint"), (args.data, "--data")):
        weights.require_file(path, option)
    import torch

    from ..demo.points import load_points
    from .running import EvaluationError

    tree = _tree(args)
    tensors = weights.tensors(args.checkpoint, args.trust)
    with _torchsparse() as ts:
        network, checked = _network(ts, tensors)
        say(f"{args.checkpoint.name}: {checked.keys} keys as published.")
        points = torch.from_numpy(load_points(args.data).points[:, :3]).double()
        facts: dict[str, Any] = {
            "project": NAME,
            "model": TITLE,
            "checkpoint": str(args.checkpoint),
            "data": str(args.data),
            "weights": {"keys": checked.keys, "others": checked.others},
        }
        if args.check:
            _show(args.json, {**facts, "results": None}, "Nothing was written.")
            return 0
        if tree is None:
            where, results = _by_network(network, points, precisions, args.device)
    if tree is not None:
        where = "the GPU, by RENO's own program"
        checkpoint = args.checkpoint.resolve()
        try:
            results = [by_program(tree, checkpoint, points, bits, say) for bits in precisions]
        except EvaluationError as error:
            say(f"sparse_bridge: {error}")
            return 1
    tolerance = TOLERANCE if args.tolerance is None else args.tolerance
    return _report(args.json, facts, results, expected, tolerance, where)


def _tree(args: argparse.Namespace) -> Path | None:
    """The source tree of `--project`."""
    from .reno_program import check_tree

    if args.tree is not None and args.device is not None:
        raise SettingError("--device is for the network here; RENO's own program wants a GPU.")
    return None if args.tree is None else check_tree(args.tree)


def _by_network(
    network: OccupancyCodec, points: torch.Tensor, precisions: tuple[int, ...], name: str | None
) -> tuple[str, list[Result]]:
    """(device, results) of the network here."""
    import torch

    from .stream import torchac

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise SettingError("--device cuda: torch sees no GPU here; use --device cpu.")
    device, coder = torch.device(name), torchac()
    network.to(device)
    return name, [round_trip(network, points, bits, coder, device) for bits in precisions]


def round_trip(network: OccupancyCodec, points: torch.Tensor, bits: int, coder: Coder, device: torch.device) -> Result:
    """Write points [N, 3] in metres as coordinates of so many bits, and read them back."""
    import torch

    from .stream import decode, encode

    step, cells = _cells(points, bits)
    voxels = torch.nn.functional.pad(cells, (1, 0)).to(device)
    file = encode(network, voxels, step, coder)
    try:
        read, voxels_read = decode(network, file, coder, device, len(points))
    except CoordinateError as error:
        distinct = len(torch.unique(cells, dim=0))
        return Result(bits, len(points), distinct, len(file), 0, fault=str(error))
    assert read == step
    return _compared(bits, cells, voxels_read[:, 1:].cpu(), len(file))


def by_program(tree: Path, checkpoint: Path, points: torch.Tensor, bits: int, say: Callable[[str], None]) -> Result:
    """The same by RENO's own program in `tree`. Raises EvaluationError."""
    import torch

    from .reno_program import write_and_read

    step, cells = _cells(points, bits)
    with tempfile.TemporaryDirectory(prefix="sparse_bridge_verify_") as scratch:
        size, points_read = write_and_read(tree, checkpoint, points.numpy(), step, Path(scratch), say)
    return _compared(bits, cells, _cells(torch.from_numpy(points_read), bits)[1], size)


def _cells(points: torch.Tensor, bits: int) -> tuple[float, torch.Tensor]:
    """(step in millimetres, the cell int32 [N, 3] of every point)."""
    step = 2.0 ** (_MOST_BITS - bits)
    return step, ((points / _UNIT + _ORIGIN) / step).round().int()


def _compared(bits: int, wrote: torch.Tensor, read: torch.Tensor, size: int) -> Result:
    """wrote, read: cells int32, which may repeat."""
    import torch

    wanted, decoded = torch.unique(wrote, dim=0), torch.unique(read, dim=0)
    union = torch.unique(torch.cat([wanted, decoded]), dim=0)
    came_back = len(wanted) + len(decoded) - len(union)
    return Result(bits, len(wrote), len(wanted), size, came_back, len(decoded) - came_back)


@contextlib.contextmanager
def _torchsparse() -> Iterator[Any]:
    """The stand-in of torchsparse 2.1."""
    import importlib

    from ...adapters import lifecycle

    with lifecycle.enable("torchsparse", mode="standin", profile="2.1"):
        yield importlib.import_module("torchsparse")


def _network(ts: Any, tensors: Mapping[str, torch.Tensor]) -> tuple[OccupancyCodec, weights.Checked]:
    """The network with these weights. Raises ShapeError for those of another one."""
    from ..networks.codec import OccupancyCodec

    network = OccupancyCodec(ts).eval()
    shapes = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    stored = {key: tuple(value.shape) for key, value in tensors.items()}
    checked = weights.compare(stored, shapes, TITLE)
    network.load_state_dict({key: tensors[key] for key in shapes})
    return network, checked


def _precisions(options: list[int] | None) -> tuple[int, ...]:
    bits_of = tuple(dict.fromkeys(options or PRECISIONS))
    for bits in bits_of:
        if not 3 <= bits <= _MOST_BITS:
            raise SettingError(f"--bits {bits}: expected 3 to {_MOST_BITS} bits of a coordinate.")
    return bits_of


def _sizes(options: list[str], precisions: tuple[int, ...]) -> dict[int, int]:
    sizes = {}
    for text in options:
        bits, _, size = text.partition("=")
        if not (bits.isdigit() and int(bits) in precisions and size.isdigit() and int(size)):
            raise SettingError(
                f"--expect {text}: expected BITS=BYTES with one of {', '.join(map(str, precisions))} bits."
            )
        sizes[int(bits)] = int(size)
    return sizes


def _report(
    as_json: bool,
    facts: Mapping[str, Any],
    results: list[Result],
    expected: Mapping[int, int],
    tolerance: float,
    where: str,
) -> int:
    """Print the results; the exit status."""
    described, rows = [], []
    for result in results:
        published = expected.get(result.bits)
        near = published is None or abs(result.size - published) <= tolerance / 100 * published
        described.append(
            {
                **dataclasses.asdict(result),
                "bits_per_point": result.bits_per_point,
                "whole": result.whole,
                "expected": published,
                "reached": result.whole and near,
            }
        )
        verdict = "every voxel" if result.whole else "not every voxel"
        rows.append(
            (
                f"{result.bits} bits",
                f"{result.points:,}",
                f"{result.voxels:,}",
                f"{result.came_back:,}",
                f"{result.size:,}",
                f"{result.bits_per_point:.3f}",
                "" if published is None else f"{published:,}",
                verdict if near else f"{verdict}, another size",
            )
        )
    remark = f"On {where}." + f" Tolerance of sizes: {tolerance:g} %." * bool(expected)
    faults = [f" {result.bits} bits: {result.fault}" for result in results if result.fault]
    table = Table(TITLE, _COLUMNS, rows, remark=remark + "".join(faults))
    facts = {**facts, "device": where, "tolerance": tolerance, "results": described}
    _show(as_json, facts, table.plain())
    return 0 if all(result["reached"] for result in described) else 1


def _show(as_json: bool, facts: Mapping[str, Any], text: str) -> None:
    sys.stdout.write((json.dumps(facts) if as_json else text) + "\n")
