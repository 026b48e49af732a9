"""A model of the matrix, made ready to run: its module, weights, inputs, outputs and loss."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn

from sparse_bridge.adapters import protocol

from . import scenes
from .matrix import Model

__all__ = ["SCENES", "Subject", "flatten"]


SCENES = 24  # that are kept, of as many seeds
_made = functools.lru_cache(maxsize=SCENES)(scenes.make)


class Subject:
    """One model on one device in one dtype.

    scene: makes the scene of a seed; by default from the model's preset and `size`.
    """

    def __init__(
        self, model: Model, device: str, dtype: str, size: str, scene: Callable[[int], scenes.Scene] | None = None
    ) -> None:
        self.model = model
        self.device = torch.device(device)
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.size = size
        self._scene = scene

    @property
    def module(self) -> ModuleType:
        """The model's file, imported when it is first asked for."""
        return importlib.import_module(self.model.module)

    def scene(self, seed: int = 0, size: str | None = None) -> scenes.Scene:
        """The input of a seed; tiny scenes keep their own batch size."""
        model = self.model
        batch = model.batch_size if size in (None, self.size) else None
        made = (
            self._scene(seed)
            if self._scene
            else _made(model.preset, size or self.size, model.features, model.dimension, batch, seed)
        )
        # Models write into their inputs; on the CPU these share the scene's memory.
        tensors = {name: getattr(made, name).clone() for name in ("coords", "features", "points")}
        return dataclasses.replace(made, **tensors)

    def network(self, seed: int = 0, dtype: torch.dtype | None = None) -> nn.Module:
        """A new network; equal seeds give equal weights. Dropout is off: rows have no names."""
        torch.manual_seed(seed)
        network = self.module.build(**self.model.options)
        for layer in network.modules():
            if isinstance(layer, nn.modules.dropout._DropoutNd):
                layer.p = 0.0
        return network.to(self.device, dtype or self.dtype)

    def batch(self, scene: scenes.Scene, dtype: torch.dtype | None = None) -> tuple[Any, ...]:
        """The network's arguments; frameworks cache maps in them, so every pass gets new ones."""
        return self.module.batch(scene, self.device, dtype or self.dtype)

    def outputs(self, result: Any) -> list[torch.Tensor]:
        """The tensors of a result, rows of sparse ones in the order of their coordinates."""
        own = getattr(self.module, "outputs", None)
        return list(flatten(own(result) if own else result))

    def loss(self, result: Any) -> torch.Tensor:
        """The module's own, or one that neither row order nor a final batch norm makes trivial."""
        own = getattr(self.module, "loss", None)
        if own:
            return own(result)
        terms = [_wavy_mean(one) for one in self.outputs(result) if one.requires_grad]
        assert terms, "no output depends on a parameter"
        return torch.stack(terms).sum()

    def run(self, network: nn.Module, scene: scenes.Scene | None = None) -> Any:
        """One pass over a new batch."""
        return network(*self.batch(scene or self.scene()))

    def gradients(self, network: nn.Module) -> dict[str, torch.Tensor]:
        """Gradients by parameter name.

        Raises:
            AssertionError: one is missing that the model does not leave out, or not finite.
        """
        found: dict[str, torch.Tensor] = {}
        missing = []
        for name, parameter in network.named_parameters():
            if parameter.grad is not None:
                found[name] = parameter.grad.detach().clone()
            elif parameter.requires_grad and not name.startswith(self._left_out):
                missing.append(name)
        assert not missing, f"{len(missing)} parameters have no gradient: {', '.join(missing[:3])}"
        bad = [name for name, grad in found.items() if not torch.isfinite(grad).all()]
        assert not bad, f"{len(bad)} gradients are not finite: {', '.join(bad[:3])}"
        assert any(grad.any() for grad in found.values()), "all gradients are zero"
        return found

    @property
    def _left_out(self) -> tuple[str, ...]:
        return tuple(self.model.without_gradient)


def flatten(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists, mappings and sparse tensors, in order.

    Raises:
        TypeError: something else is in there; the model's file then needs `outputs(result)`.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from flatten(value[key])
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from flatten(one)
    else:
        yield _sorted_rows(value)


def _sorted_rows(value: Any) -> torch.Tensor:
    rows, found = protocol.features_of(value), protocol.of(value)
    if rows is not None and found is not None:
        sites = found.coordinates_of(value)
        if len(rows) != len(sites):
            return rows
        order = torch.arange(len(sites), device=sites.device)
        for column in range(sites.shape[1] - 1, -1, -1):
            order = order[torch.argsort(sites[order, column], stable=True)]
        return rows[order.to(rows.device)]
    raise TypeError(f"got a {type(value).__name__} among the results; expected tensors.")


def _wavy_mean(output: torch.Tensor) -> torch.Tensor:
    """The mean of a sine of each element, of another frequency in each channel."""
    channels = output.shape[1] if output.dim() > 1 else 1
    ramp = torch.linspace(0, 1, channels, device=output.device)
    shape = (1, channels) + (1,) * (output.dim() - 2) if output.dim() > 1 else (1,)
    frequency, phase = (0.5 + ramp).view(shape), (math.pi * ramp).view(shape)
    values = output.float() if output.dtype != torch.float64 else output
    # Cells that a dense output leaves empty are worth nothing.
    count = (values.detach() != 0).sum().clamp(min=1)
    return (torch.sin(values * frequency + phase) - torch.sin(phase)).sum() / count
