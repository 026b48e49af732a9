"""Whole models as one captured graph of launches (CUDA graph): inference without a line of Python.

A model whose maps are prefetched runs the same launches for every input of about the same size. So
they are captured once (HIP has the same graphs) over a padded input, see `padded`, and replayed:
features and coordinates are copied in, results cut to size and copied out, for which the host waits
only until the coordinates of all levels are through. Before a graph is trusted, the model runs over
the padded input with NaN in every row that does not exist, and has to agree with what it computes
ordinarily. Sparse tensors are read through `replay_parts.Tensors`, whatever their framework.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ... import hooks
from .captured_maps import CapturedMaps, apart, captured
from .padded import UnpaddedError
from .replay_parts import (
    Kind,
    Replays,
    Tensors,
    addresses,
    cutter,
    kind_of,
    maps_like,
    over_padded,
    rebuilt,
)
from .replay_training import TrainingReplayer


class _Graph:
    """One captured inference, over maps that have graphs of their own."""

    def __init__(
        self, maps: CapturedMaps, features: torch.Tensor, tensors: Tensors,
        work: Callable[[], Any], modules: Sequence[nn.Module], pool: Any,
    ) -> None:  # fmt: skip
        """work: the model over the padded scene, `features` in it."""
        self.maps, self.features, self.tensors = maps, features, tensors
        self.graph, self.output = captured(work, pool)
        self.parameters = addresses(modules)

    def run(self, x: Any) -> Any:
        """The model's output for `x`; None where the graph cannot serve it."""
        features, coords = self.tensors.features_of(x), self.tensors.coordinates_of(x)
        assert features is not None  # `kind_of` has seen them
        n_rows = features.shape[0]
        self.maps.start(coords)
        self.features[:n_rows].copy_(features)
        self.graph.replay()
        rows = self.maps.rows(n_rows)
        if rows is None:
            return None
        return rebuilt(self.tensors, self.output, cutter(self.maps.scene, rows, coords))


class Replayer(Replays):
    """The forward of a model in evaluation.

    agree: whether two outputs are equal within rounding.  training: takes the calls with gradients.
    """

    most = 6
    _carried = ("agree", "training")

    def __init__(self, training: TrainingReplayer, agree: Callable[[Any, Any], bool]) -> None:
        super().__init__(training.model, training.forward, training.tensors_of)
        self.training, self.agree = training, agree

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return self.training(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def _serve(self, kind: Kind, x: Any) -> Any:
        graph = self.held(kind)
        out = None if graph is None else self._run(graph, kind, x)
        if out is not None:
            return out
        out = self.forward(x)
        if graph is None:
            self.consider(kind, lambda: self._capture(kind, x, out))
        return out

    def _run(self, graph: _Graph, kind: Kind, x: Any) -> Any:
        """One at a time: all graphs of a model share their memory."""
        with self.lock, torch.cuda.device(kind.device):
            self.follow()
            return graph.run(x)

    def _kind(self, x: Any) -> Kind | None:
        if not hooks.inference():
            return None
        if any(m.training or m._forward_hooks or m._forward_pre_hooks for m in self.modules):
            return None
        return kind_of(self.tensors_of(x), x)

    def _capture(self, kind: Kind, x: Any, out: Any) -> _Graph | None:
        # What is made in inference mode could not be written to outside of it.
        with torch.inference_mode(False), torch.no_grad(), apart(kind.device):
            found = maps_like(x, kind, self.pool)
            if found is None:
                return None
            maps, rows = found
            tensors, scene, own = kind.tensors, maps.scene, kind.tensors.features_of(x)
            assert own is not None
            features = torch.full(
                (kind.capacity, kind.channels), float("nan"), dtype=kind.dtype, device=kind.device
            )
            features[: own.shape[0]].copy_(own)

            def work() -> Any:
                return over_padded(self.forward, scene, features, x, tensors)

            scene.fill = float("nan")
            cut = cutter(scene, rows, tensors.coordinates_of(x))
            if not self.agree(out, rebuilt(tensors, work(), cut)):
                raise UnpaddedError("it mixes rows outside its sparse layers.")
            scene.fill = None
            return _Graph(maps, features, tensors, work, self.modules, self.pool)
