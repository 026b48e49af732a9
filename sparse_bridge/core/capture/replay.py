"""Whole models as one captured graph of launches (CUDA graph): inference without a line of Python.

A model whose maps are prefetched runs the same launches for every input of about the same size. So
they are captured once (HIP has the same graphs) over a padded input, see `padded`, and replayed:
features and coordinates are copied in, results cut to size and copied out, for which the host waits
only until the coordinates of all levels are through. Before a graph is trusted, the model runs over
the padded input with NaN in every row that does not exist, and has to agree with what it computes
ordinarily. Sparse tensors are read through `graphed_module.Tensors`, whatever their framework.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ... import hooks, policy, settings
from ...refusals import Refusal, Why
from ..closed_world.kept import assert_no_mutation
from ..geometry.data_bounds import Root
from ..maps.rows import fill_behind
from ..prefetch.recording import Recording
from .call_kind import CallKind
from .calls.call import ReplayResult
from .calls.exact_operators import ExactOperators
from .calls.foreign import ForeignReads
from .calls.index_checks import IndexChecks
from .calls.input_proxies import Call
from .calls.structures import MISSING
from .calls.written_buffers import WrittenBuffers, buffers_of
from .captured_maps import CapturedMaps, maps_like, on_own_stream, own_random_numbers
from .captured_model import ITEMS, Captured, for_each_output
from .graph_capture import captured_from
from .graph_key import GraphKey, addresses, tensors_of_modules
from .graphed_module import GraphedModule
from .padded import LARGE_FILL


class _Graph:
    """One captured inference, over maps that have graphs of their own.  verified: see `CallKind`."""

    verified: set[int]

    def __init__(
        self,
        maps: CapturedMaps,
        features: torch.Tensor,
        work: Callable[..., Captured],
        modules: Sequence[nn.Module],
        weights: Sequence[torch.Tensor],
        pool: Any,
        alters: bool,
    ) -> None:
        """work: the model over the padded input, `features` in it, inside of contexts.  weights:
        parameters and buffers.  alters: see `ForeignReads`."""
        self.maps, self.features, self.alters = maps, features, alters
        self.graph, self.captured = captured_from(work, pool)
        self.parameters = addresses(modules)
        # Launches that are queued before anybody asks whether these moved read them here.
        self._weights = [weight.detach() for weight in weights]

    def run(self, features: torch.Tensor) -> None:
        """Queue the launches behind the maps."""
        self.features.narrow(0, 0, features.shape[0]).copy_(features)
        self.graph.replay()

    def undo(self) -> None:
        """Of a graph that alters nothing."""

    def values(self, call: Call, root: Root) -> Callable[[Any], Any] | None:
        """What makes values of the output those of the call. None where the graph cannot serve
        this input."""
        rows = self.maps.rows_over(root)
        return None if rows is None else self.captured.of(call, rows, root)


class Summary(NamedTuple):
    """What became of a model: its class, calls that were replayed, graphs, and why there are no
    more."""

    name: str
    hits: int
    graphs: int
    reason: str | None


def summary_of(*modes: GraphedModule) -> Summary:
    """Of one model, whose calls these serve."""
    hits, graphs = sum(mode.hits for mode in modes), sum(len(mode.graphs) for mode in modes)
    reason = next((why for mode in modes if (why := mode.why()) is not None), None)
    return Summary(type(modes[0].model).__name__, hits, graphs, reason)


class Replayer(GraphedModule):
    """The forward of a model in evaluation; training: takes the calls with gradients, see `replay_training`. A frozen
    model has none, also where gradients are recorded.  part: it is called by another module, and may be too small to be
    worth a graph."""

    def __init__(self, training: GraphedModule, asked: bool = True, part: bool = False) -> None:
        super().__init__(training.model, training.tensors_of, asked)
        self.training, self.hindered, self.part = training, training.hindered, part
        self.reads = training.reads
        self.slower = False  # replays were not faster than the layers
        self._least = {False: math.inf, True: math.inf}  # seconds of a call, by whether a graph served it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.part or torch.is_grad_enabled() or settings.get().optimize == "graphs":
            return super().__call__(*args, **kwargs)
        start, hits = time.perf_counter(), self.hits
        out = super().__call__(*args, **kwargs)
        self._time(time.perf_counter() - start, self.hits > hits)
        return out

    def _time(self, seconds: float, replayed: bool) -> None:
        """Learn how long a call took on the host. After some replays that were no faster than the layers, the layers
        serve all calls."""
        self._least[replayed] = min(self._least[replayed], seconds)
        layers, replays = self._least.values()
        if replayed and self.hits == policy.REPLAYS_SETTLED and replays > layers:
            self.slower = True
            self.leave_room()
            self.refuse(Why.GRAPH_SLOWER.says(1e3 * replays, 1e3 * layers))

    def may_replay(self) -> bool:
        return not self.slower and super().may_replay()

    def summary(self) -> Summary:
        """Hits and graphs, of calls with and without gradients, and what stands against more."""
        return summary_of(self, self.training)

    def mode(self) -> GraphedModule:
        """What serves calls now."""
        return self.training if torch.is_grad_enabled() and not self._frozen() else self

    def _frozen(self) -> bool:
        """Whether the model has nothing that is trained, and is in evaluation."""
        if self.inner is None:
            self.look_for_modules()
        return not (self._learns() or any(m.training for m in self.modules))

    def _learns(self) -> bool:
        return any(one.requires_grad for one in tensors_of_modules(self.modules))

    def modes(self) -> tuple[GraphedModule, ...]:
        """What may serve calls now: which one, their features say."""
        mode = self.mode()
        return (self, self.training) if mode is self and torch.is_grad_enabled() else (mode,)

    def try_replay(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ReplayResult | None:
        mode = self.mode()
        return super().try_replay(args, kwargs) if mode is self else mode.try_replay(args, kwargs)

    def try_call(self, call: Call) -> ReplayResult | None:
        if torch.is_grad_enabled():
            tensors = self.tensors_of(call.x)
            features = None if tensors is None else tensors.features_of(call.x)
            if features is not None and features.requires_grad:
                return self.training.try_call(call) if self.training.may_replay() else None
        return super().try_call(call)

    def complete_key(self, key: GraphKey) -> GraphKey:
        # The model may record gradients itself, or ask for the mode.
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), self._learns()
        return key._replace(switches=(*key.switches, *modes))

    def allowed(self) -> bool:
        if torch.is_grad_enabled():
            return self._frozen() and not (hooks.traced() or hooks.hooked_everywhere())
        return hooks.inference()

    def possible(self) -> bool:
        return not any(m.training or m._forward_hooks or m._forward_pre_hooks for m in self.modules)

    @contextlib.contextmanager
    def _run(self, graph: _Graph, call: Call, root: Root) -> Iterator[Any]:
        """One at a time, until what it left is copied: all graphs of a model share their memory."""
        with self.lock, torch.cuda.device(root.coords.device):
            self.start(graph, root)
            gone = self.parameters_moved(graph)
            if not (self.speculation.take(graph) or gone):
                features = graph.captured.tensors.features_of(call.x)
                assert features is not None
                graph.run(features)
            try:
                yield None if gone else graph.values(call, root)
            finally:
                graph.maps.memory.used()

    def before_layers(self, call: Call) -> Call:
        return call._replace(buffers=buffers_of(self.model))

    def execute(self, graph: _Graph, call: Call, root: Root) -> Any:
        with self._run(graph, call, root) as convert:
            return MISSING if convert is None else graph.captured.spec.write_back(call, convert)

    def replay_and_compare(self, graph: _Graph, call: Call, root: Root, out: Any) -> bool:
        with self._run(graph, call, root) as convert:
            if convert is None:
                return False
            values = list(map(convert, graph.captured.spec.values()))
        graph.captured.compare(call, root, out, values)
        return True

    def record_graph(
        self, kind: CallKind, key: GraphKey, recording: Recording, capacity: int, call: Call, root: Root, out: Any
    ) -> _Graph | None:
        if torch.is_grad_enabled() and not self._frozen():  # a module that trains was added
            return None
        # What is made in inference mode could not be written to outside of it.
        unchanged, memory = assert_no_mutation(self.model, key.tensors), self.memory
        assert memory is not None
        gradients = torch.is_grad_enabled()  # as in the call: layers ask for it, and programs may
        random_numbers = own_random_numbers(key.device)
        with torch.inference_mode(False), torch.set_grad_enabled(gradients), random_numbers, unchanged:
            captured_maps = maps_like(root, recording, capacity, memory, ITEMS in self.box_columns)
            if captured_maps is None:
                return None
            maps, rows = captured_maps
            padded_input, own = maps.padded_input, key.tensors.features_of(call.x)
            assert own is not None
            features = torch.full((capacity, key.channels), float("nan"), dtype=key.dtype, device=key.device)
            features[: own.shape[0]].copy_(own.detach())
            n_reads = len(self.reads)

            def work(contexts: Sequence[Any]) -> Captured:
                return Captured(self, self.run_layers, call, padded_input, features, root.box, contexts)

            weights = [*self.model.parameters(), *self.model.buffers()]
            if kind.trial is None:
                padded_input.padding_value = float("nan")
                known = [features, *padded_input.tensors(), *weights]
                reads = ForeignReads(known, self.numbers, dict(self.model.named_parameters()))
                written = WrittenBuffers(self.model, call.buffers)
                captured_model = work([written, reads])
                memory.multiplies = memory.multiplies or reads.multiplies
                mine = captured_model.spec
                for spec in (mine, mine.of_call(call, out, key.tensors)):
                    for_each_output(key.tensors, spec, _refuse_gradient)
                written.verify()
                if self.needs_more_guards(n_reads, captured_model.box_columns(root, kind.guards)):
                    return None
                rounded = captured_model.rounds_by_rows(call, root, rows, out, functools.partial(_exactly, work))
                del captured_model
                padded_input.refuse_mixed()
                padded_input.padding_value = LARGE_FILL  # some operators leave out NaN
                fill_behind(features, own.shape[0], LARGE_FILL)
                captured_model = work([written, IndexChecks(padded_input.capacities, weights)])
                written.verify()
                captured_model.rounded = rounded
                captured_model.compare_values(call, root, rows, out)
                del captured_model
                padded_input.padding_value = None
                kind.trial = reads.alters, rounded
            alters, rounded = kind.trial
            with on_own_stream(key.device, memory.stream):
                made = memory.captured(lambda pool: _Graph(maps, features, work, self.modules, weights, pool, alters))
                made.captured.rounded = rounded
                return made


def _refuse_gradient(tensor: torch.Tensor) -> None:
    """Raise Refusal for an output that requires a gradient: the model records it where the call does not."""
    if tensor.requires_grad:
        raise Refusal(Why.GRAPH_OTHER_MODE)


def _exactly(work: Callable[..., Captured]) -> Captured | None:
    """The model over its padded input with `ExactOperators`; None where there are none of those."""
    exact = ExactOperators()
    captured_model = work([exact])
    return captured_model if exact.used else None
