"""Memory in which the programs of a launch hand partial sums to each other.

Every stream of a GPU has its own, as launches of one stream run one after another, and it stays:
counters are to be zero when a launch begins, and launches leave them so. What a CUDA graph captures
has memory of the graph's own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import target as targets

_STREAMS = 8  # that keep memory


class Scratch(NamedTuple):
    """sums: fp32.  counts: int32, zeros."""

    sums: torch.Tensor
    counts: torch.Tensor


class Scratches:
    """What a process holds, by GPU and stream; the one used last stands last."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], Scratch] = {}

    def reset(self) -> None:
        """Give all of it back."""
        self._held.clear()

    def of(self, device: torch.device, sums: int, counts: int) -> Scratch:
        """For the next launch on the current stream, with room for so many values."""
        index = targets.device_index(device)
        if index < 0 or targets.capturing(device):
            return _made(device, sums, counts)
        key = index, targets.current_stream(device)
        held = self._held.pop(key, None)
        if held is None or held.sums.numel() < sums or held.counts.numel() < counts:
            held = _made(device, sums, counts)
        self._held[key] = held
        if len(self._held) > _STREAMS:
            # Its last launch may still run: the allocator gives memory back to its own stream.
            self._held.pop(next(iter(self._held)), None)
        return held


def _made(device: torch.device, sums: int, counts: int) -> Scratch:
    with torch.inference_mode(False):  # it serves calls outside of inference mode, too
        return Scratch(
            torch.empty(sums, dtype=torch.float32, device=device),
            torch.zeros(counts, dtype=torch.int32, device=device),
        )


_scratches = Scratches()  # of this process
scratch = _scratches.of
reset = _scratches.reset
