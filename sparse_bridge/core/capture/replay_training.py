"""Training steps of whole models as captured graphs: forward and backward without a line of Python.

As `replay` does for inference, over a padded input. Three graphs: the maps, after which the host
knows whether the input fits; the forward pass; the backward pass, which torch's autograd
starts where it would have walked through the model. Batch norms divide by the rows that there are.
Losses, optimizers, scalers and whatever hangs on the parameters' gradients see no difference.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ... import hooks
from .captured_maps import CapturedMaps, apart, captured
from .replay_parts import Kind, Replays, addresses, cutter, kind_of, maps_like, rebuilt
from .replay_trial import PaddedModel, gradients_of, leaves_of


class TrainingReplayer(Replays):
    """The forward of a model where gradients are wanted.

    Between a replayed forward and its backward pass, other inputs run as ever: all graphs of a
    model share their memory.
    """

    most = 3

    def _forget(self) -> None:
        super()._forget()
        self.capturing = False
        self.pending: Callable[[], _Run | None] = lambda: None

    def _serve(self, kind: Kind, x: Any) -> Any:
        graph = self.held(kind)
        if graph is None:
            out = self.forward(x)
            self.consider(kind, lambda: self._capture(kind, x))
            return out
        with self.lock, torch.cuda.device(kind.device):
            run = self._begin(graph, x)
        return self.forward(x) if run is None else graph.output_of(run, x)

    def _kind(self, x: Any) -> Kind | None:
        before = self.pending()
        if self.capturing or (before is not None and before.open):
            return None
        if hooks.hooked_everywhere() or any(hooks.hooked(module) for module in self.modules):
            return None
        kind = kind_of(self.tensors_of(x), x)
        if kind is None or hooks.traced():
            return None
        modes = tuple([module.training for module in self.modules])
        wanted = tuple([p.requires_grad for p in self.model.parameters()])
        features = kind.tensors.features_of(x)
        assert features is not None
        more = (features.requires_grad, modes, wanted)
        return kind._replace(switches=(*kind.switches, *more))

    def _begin(self, graph: _Graph, x: Any) -> _Run | None:
        """Replay the maps; None where the graph cannot serve this scene."""
        before = self.pending()
        if before is not None and before.open:  # another thread's, by now
            return None
        self.follow()
        coords = graph.tensors.coordinates_of(x)
        graph.maps.start(coords)
        rows = graph.maps.rows(coords.shape[0])
        if rows is None:
            return None
        run = _Run(self, graph, rows)
        self.pending = weakref.ref(run)
        return run

    def _capture(self, kind: Kind, x: Any) -> _Graph | None:
        self.capturing = True
        try:
            with torch.autograd.set_multithreading_enabled(False), apart(kind.device):
                found = maps_like(x, kind, self.pool, training=True)
                if found is None:
                    return None
                maps, rows = found
                copy = PaddedModel(self.model, x, kind.tensors)
                copy.try_out(maps.scene, rows)
                return _Graph(copy, self.modules, maps, self.pool)
        finally:
            self.capturing = False


class _Graph:
    """A captured training step, but for the loss and the optimizer."""

    def __init__(
        self, copy: PaddedModel, modules: Sequence[nn.Module], maps: CapturedMaps, pool: Any
    ) -> None:
        self.maps, self.scene = maps, maps.scene
        self.model, self.tensors = copy.model, copy.tensors
        self.features = copy.capacity(self.scene)
        self.forward, self.output = captured(lambda: copy.over(self.scene, self.features), pool)
        self.leaves = leaves_of(self.tensors, self.output)
        self.levels = [self.scene.level_of(leaf) for leaf in self.leaves]
        self.cotangents = [torch.zeros_like(leaf) for leaf in self.leaves]
        inputs = copy.inputs(self.features)
        self.backward, self.gradients = captured(
            lambda: gradients_of(self.leaves, inputs, self.cotangents), pool
        )
        self.parameters = addresses(modules)

    def output_of(self, run: _Run, x: Any) -> Any:
        """The model's output for `x`, whose maps are replayed already."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        found = _Replay.apply(run, self.tensors.features_of(x), *trained)
        made = {id(leaf): one for leaf, one in zip(self.leaves, found, strict=True)}
        cut = cutter(self.scene, run.rows, self.tensors.coordinates_of(x))

        def one_of(tensor: torch.Tensor) -> torch.Tensor:
            mine = made.get(id(tensor))
            return cut(tensor.detach()) if mine is None else mine

        return rebuilt(self.tensors, self.output, one_of)


class _Run:
    """One training step."""

    def __init__(self, owner: TrainingReplayer, graph: _Graph, rows: dict[int, int]) -> None:
        self.owner, self.graph, self.rows = owner, graph, rows
        self.open = True  # until the backward pass

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, ...]:
        graph = self.graph
        with self.owner.lock:
            self.owner.follow()
            graph.features.detach()[: features.shape[0]].copy_(features)
            graph.forward.replay()
            pairs = zip(graph.leaves, graph.levels, strict=True)
            return tuple([leaf.detach()[: self.rows[level]].clone() for leaf, level in pairs])

    def backward(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Of the features, if those are wanted, and the trained parameters."""
        if not self.open:
            raise RuntimeError(
                "a training step replayed from a graph goes backward once; call "
                "sparse_bridge.restore(model) for more."
            )
        graph = self.graph
        with self.owner.lock:
            self.owner.follow()
            for wide, one, level in zip(graph.cotangents, gradients, graph.levels, strict=True):
                rows = self.rows[level]
                wide[:rows].copy_(one)
                wide[rows:].zero_()
            graph.backward.replay()
            found = [one for one in graph.gradients if one is not None]
            copies = [torch.empty_like(one) for one in found]
            torch._foreach_copy_(copies, found)
            self.open = False
        given = iter(copies)
        return [None if one is None else next(given) for one in graph.gradients]


class _Replay(torch.autograd.Function):
    """The model as one node of autograd's graph."""

    @staticmethod
    def forward(
        ctx: Any, run: _Run, features: torch.Tensor, *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.run, ctx.rows = run, features.shape[0]
        return run.forward(features)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        found = ctx.run.backward(gradients)
        if not ctx.needs_input_grad[1]:
            return None, None, *found
        first, *others = found
        return None, None if first is None else first[: ctx.rows], *others
