"""Measuring layers as spconv does.

With `x.benchmark` on, layers write down rows and seconds; with an enabled `x._timer`, GPU times.

Entries of `x.benchmark_record`, by layer name: type, indice_gen_time [], time [], num_points [],
num_out_points [], params {}. The dictionary travels along with the tensor through the network.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch

from ...errors import ContractError

_SIZES = ("kernel_size", "stride", "padding", "dilation")


class UnnamedLayerError(ContractError, ValueError):
    """A layer without a name in benchmark mode."""


class Stopwatch:
    """Times one call of a layer; `built` after a new map, `finish` at the end."""

    def __init__(self, entry: dict[str, Any], x: Any) -> None:
        self._entry = entry
        self._device: torch.device = x.features.device
        self._n_in = int(x.features.shape[0])
        self._start = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def built(self) -> None:
        """The kernel map was made anew since the start."""
        self._entry["indice_gen_time"].append(self._now() - self._start)

    def finish(self, n_out: int) -> None:
        """The layer is done, with `n_out` rows."""
        self._entry["time"].append(self._now() - self._start)
        self._entry["num_points"].append(self._n_in)
        self._entry["num_out_points"].append(n_out)


_NOTHING = contextlib.nullcontext()


def timed(x: Any, name: str) -> contextlib.AbstractContextManager[Any]:
    """Records the layer `name` where the tensor's timer is on."""
    timer = x._timer
    if timer is None or not timer.enable:
        return _NOTHING
    return timer.record(name)


def of_conv(x: Any, layer: Any, name: str | None) -> Stopwatch:
    """A running stopwatch; layers of kernel volume 1 never finish theirs and stay without times.

    Raises UnnamedLayerError.
    """
    params = {
        "output_padding": list(layer.output_padding),
        "subm": layer.subm,
        "transposed": layer.transposed,
        "input_channels": layer.in_channels,
        "out_channels": layer.out_channels,
    }
    return _start(x, layer, name, "SparseConvolution", params)


def of_pool(x: Any, layer: Any, layer_type: str) -> Stopwatch:
    """A running stopwatch for a local pool. Raises UnnamedLayerError."""
    return _start(x, layer, layer.name, layer_type, {"channels": int(x.features.shape[1])})


def _start(x: Any, layer: Any, name: str | None, layer_type: str, params: dict[str, Any]) -> Stopwatch:
    if not name:
        raise UnnamedLayerError(
            f"benchmark mode: this {type(layer).__name__} has no name. Give every layer a name=, "
            "or turn x.benchmark off."
        )
    sizes = {size: list(getattr(layer, size)) for size in _SIZES}
    entry = {
        "type": layer_type,
        "indice_gen_time": [],
        "time": [],
        "num_points": [],
        "num_out_points": [],
        "params": {**sizes, **params},
    }
    return Stopwatch(x.benchmark_record.setdefault(name, entry), x)
