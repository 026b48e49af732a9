"""Training steps of whole models as captured graphs: forward and backward without a line of Python.

As `replay` does for inference, over a padded input. Three graphs: the maps, after which the host
knows whether the input fits; the forward pass; the backward pass, which torch's autograd
starts where it would have walked through the model. Batch norms divide by the rows that there are.
Losses, optimizers, scalers and whatever hangs on the parameters' gradients see no difference.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ... import hooks, policy
from .calls.call import Call
from .captured_maps import CapturedMaps, on_own_stream
from .captured_model import assert_no_mutation
from .graph_capture import captured, captured_from
from .graph_key import GraphKey, Root, addresses
from .graph_maps import maps_like
from .graphed_module import MISSING, GraphedModule
from .replay_trial import PaddedModel, gradients_of, leaves_of


class TrainingReplayer(GraphedModule):
    """The forward of a model where gradients are wanted.

    Between a replayed forward and its backward pass, other inputs run as ever: all graphs of a
    model share their memory.
    """

    max_graphs = policy.TRAINING_GRAPHS

    def _forget(self) -> None:
        super()._forget()
        self.capturing = False
        self.pending: Callable[[], _Run | None] = lambda: None

    def allowed(self) -> bool:
        before = self.pending()
        if self.capturing or (before is not None and before.open) or hooks.traced():
            return False
        return not hooks.hooked_everywhere()

    def possible(self) -> bool:
        return not any(map(hooks.hooked, self.modules))

    def complete_key(self, key: GraphKey) -> GraphKey:
        modes = tuple([module.training for module in self.modules])
        held = itertools.chain.from_iterable([m._parameters.values() for m in self.modules])
        wanted = tuple([p.requires_grad for p in held if p is not None])
        return key._replace(switches=(*key.switches, modes, wanted))

    def replayed(self, graph: _Graph, call: Call, root: Root) -> Any:
        with self.lock, torch.cuda.device(root.coords.device):
            run = self._begin(graph, root)
        return MISSING if run is None else graph.output_of(run, call, root)

    def values(self, graph: _Graph, call: Call, root: Root) -> list[Any] | None:
        with self.lock, torch.cuda.device(root.coords.device):
            run = self._begin(graph, root)
        if run is None:
            return None
        features = graph.made.tensors.features_of(call.x)
        assert features is not None
        with torch.no_grad():
            found = graph.values(run.forward(features.detach()), call, run, root)
            made = list(map(found, graph.made.spec.values()))
        run.open = False
        return made

    def consider_capture(self, key: GraphKey, call: Call, root: Root, out: Any) -> None:
        self.capture_when_due(key, lambda: self._capture(key, call, root, out))

    def _begin(self, graph: _Graph, root: Root) -> _Run | None:
        """Replay the maps; None where the graph cannot serve this scene."""
        before = self.pending()
        if before is not None and before.open:  # another thread's, by now
            return None
        self.start(graph, root)
        if self.parameters_moved(graph):
            return None
        rows = graph.maps.rows(len(root.coords))
        if rows is None:
            return None
        run = _Run(self, graph, rows)
        self.pending = weakref.ref(run)
        return run

    def _capture(self, key: GraphKey, call: Call, root: Root, out: Any) -> _Graph | None:
        self.capturing = True
        try:
            unchanged = assert_no_mutation(self.model, key.tensors)
            memory = self.memory
            assert memory is not None
            on_one_thread = torch.autograd.set_multithreading_enabled(False)
            with on_one_thread, on_own_stream(key.device, memory.stream), unchanged:
                captured_maps = maps_like(root, key, memory, training=True)
                if captured_maps is None:
                    return None
                maps, rows = captured_maps
                context, known = self.capture_context(key, root.box), len(self.reads)
                copy = PaddedModel(self.model, call, root.coords, context)
                made = copy.verify(maps.scene, rows)
                if self.needs_more_guards(maps.scene, known):
                    return None
                with torch.no_grad():
                    values = list(map(made.of(call, rows, root), made.spec.values()))
                made.assert_same_structure(call, out, values)
                del made, values
                results = [memory.result_buffer(name, p) for name, p in copy.trained.items()]
                return self.capture_in_pool(key, memory, lambda pool: _Graph(copy, self.modules, maps, pool, results))
        finally:
            self.capturing = False


class _Graph:
    """A captured training step, but for the loss and the optimizer."""

    def __init__(
        self,
        copy: PaddedModel,
        modules: Sequence[nn.Module],
        maps: CapturedMaps,
        pool: Any,
        gradients: list[torch.Tensor],
    ) -> None:
        """gradients: where those of the trained parameters come to lie."""
        self.maps, self.scene, self.model = maps, maps.scene, copy.model
        self.verified: set[int] = set()  # columns in which boxes may differ
        self.tensors = copy.context.tensors
        self.features, self.gradient_mask = copy.padded_features(self.scene), copy.gradient_mask
        work = functools.partial(copy.over, self.scene, self.features)
        self.forward, self.made = captured_from(work, pool)
        self.leaves = leaves_of(self.made)
        self.cotangents = [torch.zeros_like(leaf) for leaf in self.leaves]
        inputs = copy.inputs(self.features)
        self.backward, self.gradients = captured(
            lambda: _copied_to(gradients_of(self.leaves, inputs, self.cotangents), gradients), pool
        )
        self.parameters = addresses(modules)

    def output_of(self, run: _Run, call: Call, root: Root) -> Any:
        """The model's output for a call whose maps are replayed already."""
        # As `parameters()` has them, in a tenth of the time.
        held = itertools.chain.from_iterable([m._parameters.values() for m in run.owner.modules])
        trained = [p for p in dict.fromkeys(held) if p is not None and p.requires_grad]
        found = _Replay.apply(run, self.tensors.features_of(call.x), *trained)
        return self.made.spec.write_back(call, self.values(found, call, run, root))

    def values(self, found: Sequence[torch.Tensor], call: Call, run: _Run, root: Root) -> Callable[[Any], Any]:
        """What makes values of the output those of the call, which the leaves `found` are of."""
        made = {id(leaf): one for leaf, one in zip(self.leaves, found, strict=True)}
        cut = self.made.cutter(call, run.rows)

        def one_of(tensor: torch.Tensor) -> torch.Tensor:
            if tensor is self.made.features:
                return cut(tensor)
            mine = made.get(id(tensor))
            return cut(tensor.detach()) if mine is None else mine

        return self.made.of(call, run.rows, root, one_of)


def _copied_to(gradients: list[Any], buffers: list[torch.Tensor]) -> list[Any]:
    """The last of `gradients`, copied to these buffers; None stays."""
    first = len(gradients) - len(buffers)
    pairs = list(zip(buffers, gradients[first:], strict=True))
    present = [pair for pair in pairs if pair[1] is not None]
    if present:
        torch._foreach_copy_([buffer for buffer, _ in present], [one for _, one in present])
    return [*gradients[:first], *(None if one is None else buffer for buffer, one in pairs)]


class _Run:
    """One training step."""

    def __init__(self, owner: TrainingReplayer, graph: _Graph, rows: dict[int, int]) -> None:
        self.owner, self.graph, self.rows = owner, graph, rows
        self.open = True  # until the backward pass

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, ...]:
        graph = self.graph
        with self.owner.lock:
            self.owner.wait_for_last_replay()
            graph.features.detach()[: features.shape[0]].copy_(features)
            graph.forward.replay()
            used = graph.scene.used
            return tuple([leaf.detach()[: used(leaf, self.rows)].clone() for leaf in graph.leaves])

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Of the features, if those are wanted, and the trained parameters: None where it comes
        through outputs alone that have none."""
        if not self.open:
            raise RuntimeError(
                "a training step replayed from a graph goes backward once; call sparse_bridge.restore(model) for more."
            )
        graph = self.graph
        with self.owner.lock:
            self.owner.wait_for_last_replay()
            for wide, one in zip(graph.cotangents, gradients, strict=True):
                rows = graph.scene.used(wide, self.rows) if one is not None else 0
                if one is not None:
                    wide[:rows].copy_(one)
                wide[rows:].zero_()
            graph.backward.replay()
            found = [one for one in graph.gradients if one is not None]
            copies = [torch.empty_like(one) for one in found]
            torch._foreach_copy_(copies, found)
            self.open = False
        present = iter(copies)
        every = [None if one is None else next(present) for one in graph.gradients]
        used = [through for through, one in zip(graph.gradient_mask, gradients, strict=False) if one is not None]
        if len(used) == len(graph.gradient_mask):
            return every
        return [one if any(reached) else None for one, reached in zip(every, zip(*used, strict=True), strict=True)]


class _Replay(torch.autograd.Function):
    """The model as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, run: _Run, features: torch.Tensor, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.run, ctx.rows = run, features.shape[0]
        ctx.set_materialize_grads(False)
        return run.forward(features)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        found = ctx.run.backward(gradients)
        if not ctx.needs_input_grad[1]:
            return None, None, *found
        first, *others = found
        return None, None if first is None else first[: ctx.rows], *others
