"""Training steps of whole models as captured graphs: forward and backward without a line of Python.

As `replay` does for inference, over a padded input. Three graphs: the maps, after which the host
knows whether the input fits; the forward pass; the backward pass, which torch's autograd
starts where it would have walked through the model. Batch norms divide by the rows that there are.
Losses, optimizers, scalers and whatever hangs on the parameters' gradients see no difference.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ... import hooks, policy
from ...refusals import Why
from ..closed_world.kept import assert_no_mutation
from ..conv.convolution import autocast_dtype
from ..geometry.data_bounds import Root
from ..maps.coordinate_map import CoordinateMap
from ..prefetch.recording import Recording
from .call_kind import CallKind
from .calls.autograd_nodes import ReplayNode, saved_for_backward
from .calls.input_proxies import Call
from .calls.output_spec import OutputSpec
from .calls.structures import MISSING, Tensors
from .calls.written_buffers import buffers_of
from .captured_maps import CapturedMaps, maps_like, on_own_stream, own_random_numbers
from .captured_model import ITEMS, Captured
from .graph_capture import captured, captured_from, copies_of, copy_each, in_trial, preserved_statistics, trial
from .graph_key import GraphKey, addresses, parameters_of
from .graphed_module import GraphedModule
from .inner_outputs import InnerOutputs
from .replay_trial import PaddedModel, gradients_of, leaves_of, output_leaves


class TrainingReplayer(GraphedModule):
    """The forward of a model that computes gradients.

    Between a replayed forward and its first backward pass, other inputs run without a graph: all graphs
    of a model share their memory.
    """

    trains = True

    def __init__(self, model: nn.Module, tensors_of: Callable[[Any], Tensors | None], asked: bool = True) -> None:
        super().__init__(model, tensors_of, asked)
        self.capturing = False
        self.pending: Callable[[], _Run | None] = lambda: None

    def _step_open(self) -> bool:
        return (pending := self.pending()) is not None and pending.open

    def may_replay(self) -> bool:
        possible = super().may_replay()
        if not possible and self._step_open() and hooks.may_be_replayed(self.model) and not in_trial():
            self.decline(Why.GRAPH_STEP_OPEN)
        return possible

    def allowed(self) -> bool:
        free = not (self.capturing or self._step_open())
        return free and not (hooks.traced() or hooks.hooked_everywhere())

    def possible(self) -> bool:
        buffers = itertools.chain.from_iterable([m._buffers.values() for m in self.modules])
        if any(map(hooks.hooked, self.modules)) or any(b is not None and b.requires_grad for b in buffers):
            return False
        # A replay has all gradients at once: hooks would run in another order, and where a step does not come by.
        return not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters_of(self.modules))

    def complete_key(self, key: GraphKey) -> GraphKey:
        modes = tuple([module.training for module in self.modules])
        requires_grad = tuple([p.requires_grad for p in parameters_of(self.modules)])
        return key._replace(switches=(*key.switches, modes, requires_grad))

    def execute(self, graph: StepGraph, call: Call, root: Root) -> Any:
        step = self._forward(graph, call, root)
        if step is None:
            return MISSING
        try:
            return graph.output_of(*step, call, root)
        finally:
            graph.maps.memory.used()

    def _forward(
        self, graph: StepGraph, call: Call, root: Root
    ) -> tuple[_Run, torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """A step whose forward pass is replayed, the features of the call, and the leaves of the output; None where
        the graph cannot serve this input."""
        with self.lock, torch.cuda.device(root.coords.device):
            run = self._begin(graph, call, root)
            if run is None:
                return None
            features = graph.captured.tensors.features_of(call.x)
            assert features is not None
            with torch.no_grad():  # before autograd's node is made, which takes as long as the maps
                return run, features, run.forward(features.detach())

    def launch_speculatively(self, graph: StepGraph, root: Root, features: torch.Tensor) -> bool:
        assert self.latest is not None
        if self.latest.comparison_ahead() or graph.parameters != addresses(self.modules):
            return False
        with torch.no_grad():
            return super().launch_speculatively(graph, root, features.detach())

    def before_layers(self, call: Call) -> Call:
        self.speculation.undo()
        return call._replace(buffers=buffers_of(self.model))

    def replay_and_compare(self, graph: StepGraph, call: Call, root: Root, out: Any) -> bool:
        device, copy = root.coords.device, PaddedModel(self, call, root.coords, root.box)
        on_one_thread = torch.autograd.set_multithreading_enabled(False)
        with torch.enable_grad(), on_one_thread, self.lock, torch.cuda.device(device), own_random_numbers(device):
            cotangents, check = copy.reference(graph.captured.spec.of_call(call, out, copy.tensors))
            copy.rewind()
            run = self._begin(graph, call, root)
            if run is None:
                return False
            features = copy.features.detach()
            leaves = run.forward(features)
            values = list(map(graph.values(leaves, call, run, root), graph.captured.spec.values()))
            run.open = False  # nobody else goes backward through it
            graph.captured.compare(call, root, out, values)
            check([*run.backward(features, root.coords, cotangents), *leaves])
        return True

    def _begin(self, graph: StepGraph, call: Call, root: Root) -> _Run | None:
        """Replay the maps; None where the graph cannot serve this input."""
        if self._step_open():  # another thread's, by now
            return None
        self.start(graph, root)
        moved = self.speculation.launched is not graph and self.parameters_moved(graph)
        if moved or graph.inner.looked_into(self):
            return None
        rows = graph.maps.rows_over(root)
        # Torch's norms refuse to train on a single row, and what they do on none is the framework's to say.
        if rows is None or min(rows.values()) < 2:
            return None
        run = _Run(self, graph, call, root, rows)
        self.pending = weakref.ref(run)
        return run

    def record_graph(
        self, kind: CallKind, key: GraphKey, recording: Recording, capacity: int, call: Call, root: Root, out: Any
    ) -> StepGraph | None:
        self.capturing = True
        try:
            unchanged, memory = assert_no_mutation(self.model, key.tensors), self.memory
            assert memory is not None
            on_one_thread = torch.autograd.set_multithreading_enabled(False)
            with on_one_thread, own_random_numbers(key.device), unchanged, preserved_statistics(self.model):
                captured_maps = maps_like(root, recording, capacity, memory, ITEMS in self.box_columns)
                if captured_maps is None:
                    return None
                maps, rows = captured_maps
                n_reads = len(self.reads)
                if kind.trial is None:
                    copy = PaddedModel(self, call, root.coords, root.box)
                    captured_model = copy.verify(maps.padded_input, rows, out)
                    if self.needs_more_guards(n_reads, captured_model.box_columns(root, kind.guards)):
                        return None
                    exactly = functools.partial(copy.exactly, maps.padded_input)
                    rounded = captured_model.rounds_by_rows(call, root, rows, out, exactly)
                    kind.trial = copy.gradient_mask, copy.fill, rounded
                    del captured_model, copy, exactly
                with on_own_stream(key.device, memory.stream):
                    copy = PaddedModel(self, call, root.coords, root.box)
                    copy.gradient_mask, maps.padded_input.padding_value, rounded = kind.trial
                    graph = memory.captured(lambda pool: StepGraph(copy, self.modules, maps, pool))
                    graph.captured.rounded = rounded
                    return graph
        finally:
            self.capturing = False

    def recorded(self, graph: StepGraph, call: Call, out: Any) -> None:
        tensors = graph.captured.tensors
        graph.inner.watch_layers(lambda: output_leaves(tensors, graph.captured.spec.of_call(call, out, tensors)))


class StepGraph:
    """A captured training step, but for the loss and the optimizer.  alters: its forward pass cannot be undone."""

    def __init__(self, copy: PaddedModel, modules: Sequence[nn.Module], maps: CapturedMaps, pool: Any) -> None:
        self.maps, self.padded_input = maps, maps.padded_input
        self.features, self.gradient_mask = copy.padded_features(self.padded_input), copy.gradient_mask
        self._buffers, self._before = list(copy.buffers.values()), list[torch.Tensor]()
        self.alters = sum(buffer.nbytes for buffer in self._buffers) > policy.UNDONE_BYTES

        def work(contexts: Sequence[Any]) -> Captured:
            return copy.over(self.padded_input, self.features, [*contexts, self._buffers_kept()])

        self.forward, self.captured = captured_from(work, pool)
        self.leaves = leaves_of(self.captured)
        self.saved = saved_for_backward(self.leaves, parameters_of(modules))
        self.inner = InnerOutputs(self.leaves)
        self.cotangents = [torch.zeros_like(leaf) for leaf in self.leaves]
        inputs = copy.inputs(self.features)
        self.backward, self.gradients = captured(lambda: gradients_of(self.leaves, inputs, self.cotangents), pool)
        self.parameters = addresses(modules)

    @contextlib.contextmanager
    def _buffers_kept(self) -> Iterator[None]:
        if not self.alters:
            self._before = copies_of(self._buffers)
        yield

    def run(self, features: torch.Tensor) -> None:
        """Queue the forward pass behind the maps."""
        self.features.detach()[: features.shape[0]].copy_(features)
        self.forward.replay()

    def undo(self) -> None:
        """Put the model's buffers back to what they were before the forward pass."""
        if self._before:
            copy_each(self._buffers, self._before)
            self.maps.memory.used()

    def output_of(
        self, run: _Run, features: torch.Tensor, computed: tuple[torch.Tensor, ...], call: Call, root: Root
    ) -> Any:
        """The model's output for a call whose forward pass is replayed already, with the leaves `computed`."""
        trained = [p for p in dict.fromkeys(run.parameters) if p.requires_grad]
        gradients = self.gradients[len(self.gradients) - len(trained) :]
        run.reached = [p for p, gradient in zip(trained, gradients, strict=True) if gradient is not None]
        # Autograd keeps the coordinates as long as a backward pass may come. A program may write to them meanwhile.
        coords = root.coords.clone() if root.coords.is_inference() else root.coords.data
        leaves = ReplayNode.apply(run, computed, coords, features, *run.reached)
        self.inner.watch_replay(leaves)
        return self.captured.spec.write_back(call, self.values(leaves, call, run, root))

    def values(self, leaves: Sequence[torch.Tensor], call: Call, run: _Run, root: Root) -> Callable[[Any], Any]:
        """The function that converts a value of the output to that of the call, whose leaves these are."""
        by_id = {id(wide): leaf for wide, leaf in zip(self.leaves, leaves, strict=True)}
        cut = self.captured.cutter(call, run.rows)

        def convert(tensor: torch.Tensor) -> torch.Tensor:
            if tensor is self.captured.features:
                return cut(tensor)
            leaf = by_id.get(id(tensor))
            return cut(tensor.detach()) if leaf is None else leaf

        return self.captured.of(call, run.rows, root, convert)


class _Run:
    """One training step.

    The model stays until the step is over. What its backward pass reads lies in memory that all graphs of the
    model share. Once that was written to, by a backward pass or by another step, the forward pass is replayed again.
    """

    def __init__(self, owner: TrainingReplayer, graph: StepGraph, call: Call, root: Root, rows: dict[int, int]) -> None:
        self.owner, self.graph, self.bounds, self.rows = owner, graph, root.bounds, rows
        self.call: Call | None = call  # until the first backward pass
        self.autocast = autocast_dtype(root.coords.device)
        self.modules = owner.modules
        self.parameters = parameters_of(self.modules)
        self.versions = [p._version for p in self.parameters]
        self.reached: list[nn.Parameter] = []  # by gradients
        self.open = True  # until the first backward pass
        self.token = object()  # what the owner knows it by, without keeping it

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, ...]:
        graph = self.graph
        with self.owner.lock:
            self.owner.wait_for_last_replay()
            if not self.owner.speculation.take(graph):
                graph.run(features)
            self.owner.holder = self.token
            used = graph.padded_input.used
            return tuple([leaf.detach()[: used(leaf, self.rows)].clone() for leaf in graph.leaves])

    def _forward_again(self, features: torch.Tensor, coords: torch.Tensor) -> None:
        """Have the memory hold what the backward pass of this step reads. Raises RuntimeError where it would be
        something else by now."""
        if self.versions != [p._version for p in self.parameters]:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                "a parameter of the model, between its forward and a second backward pass."
            )
        self.owner.speculation.discard()
        self.graph.maps.start(coords, self.bounds)
        with torch.no_grad(), preserved_statistics(self.modules[0]):
            self.forward(features)

    def backward(
        self, features: torch.Tensor, coords: torch.Tensor, gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Gradients of the features, if they require one, and of the trained parameters; None for those
        that only outputs without a gradient depend on."""
        graph = self.graph
        with self.owner.lock:
            self.owner.wait_for_last_replay()
            if self.owner.holder is not self.token:
                self._forward_again(features, coords)
            self.owner.holder = None  # the backward pass writes there, too
            for wide, gradient in zip(graph.cotangents, gradients, strict=True):
                rows = graph.padded_input.used(wide, self.rows) if gradient is not None else 0
                if gradient is not None:
                    wide[:rows].copy_(gradient)
                wide[rows:].zero_()
            graph.backward.replay()
            own = graph.gradients
            if graph.features.requires_grad and own[0] is not None:  # without the rows that there are not
                own = [own[0][: features.shape[0]], *own[1:]]
            computed = [gradient for gradient in own if gradient is not None]
            copies = torch._foreach_mul(computed, 1)  # in one launch, where they are of one dtype
            graph.maps.memory.used()
            self.open, self.call = False, None
        present = iter(copies)
        every = [None if gradient is None else next(present) for gradient in graph.gradients]
        used = [
            through for through, gradient in zip(graph.gradient_mask, gradients, strict=False) if gradient is not None
        ]
        if len(used) == len(graph.gradient_mask):
            return every
        return [
            gradient if any(reached) else None for gradient, reached in zip(every, zip(*used, strict=True), strict=True)
        ]

    def layers_again(
        self,
        features: torch.Tensor,
        coords: torch.Tensor,
        gradients: Sequence[torch.Tensor | None],
        inputs: list[torch.Tensor],
    ) -> list[torch.Tensor | None]:
        """Gradients of `inputs` that have gradients: the layers compute once more, and autograd goes through them."""
        call, device = self.call, features.device
        if call is None:
            raise RuntimeError(
                "gradients of gradients of a model that is replayed have to be asked for in its first backward pass; "
                "call the model in `with sparse_bridge.eager():` to have them in another one."
            )
        tensors = self.graph.captured.tensors
        start = functools.partial(tensors.over, call.x, features, CoordinateMap(coords, Root(coords, self.bounds).box))
        autocast = torch.autocast(device.type, self.autocast, self.autocast is not None)
        with trial(), preserved_statistics(self.modules[0]), autocast:
            leaves = output_leaves(tensors, OutputSpec.of(call, self.owner.run_layers, start, set()))
        pairs = zip(leaves, gradients, strict=True)
        outputs, cotangents = zip(*[pair for pair in pairs if pair[1] is not None], strict=True)
        return list(torch.autograd.grad(outputs, inputs, cotangents, create_graph=True, allow_unused=True))
