"""Whole models as one captured graph of launches: inference without a line of Python.

A model whose maps are built ahead runs the same launches for every scene of about the same size, so
they are captured once (CUDA graphs; HIP has the same) over a scene with room to spare, see
`core.padded`, and replayed: features and coordinates are copied in, results cut to size and copied
out, for which the host waits only until the coordinates of all levels are through. Before a graph
is trusted, the model runs over the padded scene with NaN in every row that does not exist and has
to agree with what it computes ordinarily.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ... import hooks
from ...core.capture.captured_maps import CapturedMaps, apart, captured
from ...core.capture.padded import UnpaddedError
from .replay_parts import (
    Kind,
    Replays,
    addresses,
    cutter,
    kind_of,
    maps_like,
    over_padded,
    rebuilt,
)
from .replay_training import TrainingReplayer

__all__ = ["Replayer"]


class _Graph:
    """One captured inference, over maps that have graphs of their own."""

    def __init__(
        self, maps: CapturedMaps, forward: Callable[[Any], Any], modules: Sequence[nn.Module],
        features: torch.Tensor, x: Any, pool: Any,
    ) -> None:  # fmt: skip
        self.maps, self.features = maps, features
        self.graph, self.output = captured(
            lambda: over_padded(forward, maps.scene, features, x), pool
        )
        self.parameters = addresses(modules)

    def run(self, x: Any) -> Any:
        """The model's output for `x`; None where the graph cannot serve it."""
        n_rows = x.features.shape[0]
        self.maps.start(x.indices)
        self.features[:n_rows].copy_(x.features)
        self.graph.replay()
        rows = self.maps.rows(n_rows)
        return None if rows is None else rebuilt(self.output, cutter(self.maps.scene, rows, x))


class Replayer(Replays):
    """The forward of a model in evaluation.

    forward: the model's own.  agree: whether two outputs are equal within rounding.  training:
    takes the calls with gradients.
    """

    most = 6
    _carried = ("agree", "training")

    def __init__(
        self, model: nn.Module, forward: Callable[..., Any], agree: Callable[[Any, Any], bool],
        training: TrainingReplayer,
    ) -> None:  # fmt: skip
        super().__init__(model, forward)
        self.agree, self.training = agree, training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return self.training(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def _serve(self, kind: Kind, x: Any) -> Any:
        graph = self.held(kind)
        out = None if graph is None else self._run(graph, x)
        if out is not None:
            return out
        out = self.forward(x)
        if graph is None:
            self.consider(kind, lambda: self._capture(kind, x, out))
        return out

    def _run(self, graph: _Graph, x: Any) -> Any:
        """One at a time: all graphs of a model share their memory."""
        with self.lock, torch.cuda.device(x.features.device):
            self.follow()
            return graph.run(x)

    def _kind(self, x: Any) -> Kind | None:
        if not hooks.inference():
            return None
        if any(m.training or m._forward_hooks or m._forward_pre_hooks for m in self.modules):
            return None
        return kind_of(x)

    def _capture(self, kind: Kind, x: Any, out: Any) -> _Graph | None:
        # What is made in inference mode could not be written to outside of it.
        with torch.inference_mode(False), torch.no_grad(), apart(kind.device):
            found = maps_like(x, kind, self.pool)
            if found is None:
                return None
            maps, rows = found
            scene = maps.scene
            features = torch.full(
                (kind.room, kind.channels), float("nan"), dtype=kind.dtype, device=kind.device
            )
            features[: x.features.shape[0]].copy_(x.features)
            scene.fill = float("nan")
            output = rebuilt(over_padded(self.forward, scene, features, x), cutter(scene, rows, x))
            if not self.agree(out, output):
                raise UnpaddedError("it mixes rows outside its sparse layers.")
            scene.fill = None
            return _Graph(maps, self.forward, self.modules, features, x, self.pool)
