"""The file of a learned codec: a network's probabilities, written and read by an arithmetic coder.

The format is RENO's: the step as fp16, then the coarsest level (number of cells, coordinates,
occupancy), then two blocks of coded half bytes for every further level.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from ...errors import CoordinateError, SettingError
from ..networks.codec import SYMBOLS, OccupancyCodec, canonical, occupied_children

__all__ = ["Coder", "decode", "encode", "torchac"]

_SCALE = (1 << 16) - SYMBOLS


class Coder(Protocol):
    """The part of `torchac` that is used. cdf: int16 [N, L + 1] on the CPU, of unsigned values in
    units of 2^-16, strictly ascending; symbols: int16 [N]."""

    def encode_int16_normalized_cdf(self, cdf: torch.Tensor, symbols: torch.Tensor) -> bytes: ...

    def decode_int16_normalized_cdf(self, cdf: torch.Tensor, data: bytes) -> torch.Tensor: ...


def torchac() -> Coder:
    """The package of that name. Raises SettingError where it is missing or cannot be built."""
    try:
        with _to_standard_error(), _scripts_found():
            return importlib.import_module("torchac")  # type: ignore[return-value]
    except ModuleNotFoundError as error:
        if error.name != "torchac":
            raise
        raise SettingError(
            "torchac, the arithmetic coder, is not installed; pip install "
            "'sparse-bridge[codec]'. It compiles itself at its first import, for which it needs a "
            "C++ compiler."
        ) from None
    except (RuntimeError, OSError, ImportError) as error:  # of the compiler, of ninja
        words = str(error).strip().splitlines() or [type(error).__name__]
        raise SettingError(
            f"torchac is installed, but cannot compile itself ({words[0]}); it needs a C++ "
            "compiler and the package ninja."
        ) from error


@contextlib.contextmanager
def _to_standard_error() -> Iterator[None]:
    """What compilers print must not get between results."""
    try:
        out, err = sys.stdout.fileno(), sys.stderr.fileno()
    except (AttributeError, io.UnsupportedOperation):  # a notebook, a test
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    sys.stdout.flush()
    saved = os.dup(out)
    try:
        os.dup2(err, out)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, out)
        os.close(saved)


@contextlib.contextmanager
def _scripts_found() -> Iterator[None]:
    """Programs that packages brought (ninja) are found where the environment is not activated."""
    before = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = before + os.pathsep + sysconfig.get_path("scripts")
    try:
        yield
    finally:
        os.environ["PATH"] = before


def quantised(probabilities: torch.Tensor) -> torch.Tensor:
    """The cumulative distributions [N, L + 1] of probabilities [N, L], as a `Coder` takes them."""
    sums = torch.nn.functional.pad(probabilities.cumsum(-1), (1, 0)).clamp(0, 1)
    steps = torch.arange(sums.shape[1], dtype=torch.int32, device=sums.device)
    values: torch.Tensor = (sums * _SCALE).round().int() + steps
    return torch.where(values < 1 << 15, values, values - (1 << 16)).to(torch.int16).cpu()


@torch.no_grad()
def encode(network: OccupancyCodec, voxels: torch.Tensor, step: float, coder: Coder) -> bytes:
    """The file of voxels int32 [N, 4] of one batch item, which may repeat, on the network's device.

    step: of the grid, in the unit of the points; kept in the file.
    """
    levels = network.levels(voxels)
    blocks = []
    for (coords, codes), (finer, wanted) in itertools.pairwise(levels):
        children, feats = network.expand(coords, codes)
        order = canonical(finer)
        if not torch.equal(children, finer.index_select(0, order)):
            raise CoordinateError(
                f"{len(coords)} cells name {len(children)} children, which are not the {len(finer)} "
                "cells of the next level: the convolution that counts occupancy is wrong."
            )
        wanted = wanted.index_select(0, order)
        low, high = wanted % SYMBOLS, wanted // SYMBOLS
        for probabilities, symbols in ((network.low(feats), low), (network.high(feats, low), high)):
            coded = symbols.to(torch.int16).cpu()
            blocks.append(coder.encode_int16_normalized_cdf(quantised(probabilities), coded))
    coords, codes = levels[0]
    return b"".join(
        [
            np.float16(step).tobytes(),
            np.int32(len(coords)).tobytes(),
            coords[:, 1:].cpu().numpy().astype(np.int32).tobytes(),
            codes.cpu().numpy().astype(np.uint8).tobytes(),
            _packed(blocks),
        ]
    )


@torch.no_grad()
def decode(
    network: OccupancyCodec, file: bytes, coder: Coder, device: torch.device, most: int
) -> tuple[float, torch.Tensor]:
    """(the step, the distinct voxels int32 [M, 4] in `canonical` order) of a file.

    most: voxels that there can be. A decoder that reads other probabilities than were written goes
    astray, and would grow its levels without end.
    Raises: CoordinateError: there are more.
    """
    step, n_cells = (float(np.frombuffer(file, np.float16, 1)[0]), int.from_bytes(file[2:6], "little"))
    cells = np.frombuffer(file, np.int32, 3 * n_cells, 6).reshape(-1, 3)
    coords = torch.nn.functional.pad(torch.tensor(cells, device=device), (1, 0))
    start = 6 + 12 * n_cells
    codes = torch.tensor(np.frombuffer(file, np.uint8, n_cells, start), device=device).long()
    blocks = _unpacked(file[start + n_cells :])
    for lower, upper in zip(blocks[::2], blocks[1::2], strict=True):
        coords, feats = network.expand(coords, codes)
        _check_rows(coords, most)
        low = _read(coder, network.low(feats), lower)
        codes = low + SYMBOLS * _read(coder, network.high(feats, low), upper)
    voxels, _ = occupied_children(coords, codes)
    _check_rows(voxels, most)
    return step, voxels


def _read(coder: Coder, probabilities: torch.Tensor, block: bytes) -> torch.Tensor:
    """The symbols int64 [N] of a block."""
    symbols = coder.decode_int16_normalized_cdf(quantised(probabilities), block)
    return symbols.to(probabilities.device).long()


def _check_rows(coords: torch.Tensor, most: int) -> None:
    if len(coords) > most:
        raise CoordinateError(
            f"the decoder found {len(coords)} cells of at most {most}: it reads other probabilities than were written."
        )


def _packed(blocks: Sequence[bytes]) -> bytes:
    lengths = [np.uint32(len(block)).tobytes() + block for block in blocks]
    return np.uint16(len(blocks)).tobytes() + b"".join(lengths)


def _unpacked(data: bytes) -> list[bytes]:
    blocks, at = [], 2
    for _ in range(int.from_bytes(data[:2], "little")):
        begin = at + 4
        at = begin + int.from_bytes(data[at:begin], "little")
        blocks.append(data[begin:at])
    return blocks
