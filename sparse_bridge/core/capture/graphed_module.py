"""A model and its graphs: which calls may be replayed, and when a graph is captured.

A kind of calls goes through the states that torch's CUDA graph trees name. Warm-up: the first calls run eagerly, and
one of them is watched, which tells whether a replay can be noticed. Recording: the next call is captured, over memory
for more rows than any call so far had; a second graph, for fewer rows, follows where many calls are small. Execution:
one graph or the other serves all calls, whatever their rows. Now and then a call that could be replayed runs eagerly as
well, and both results are compared.
"""

from __future__ import annotations

import abc
import functools
import logging
from typing import Any

import torch

from ... import hooks
from ...refusals import Refusal, Verdict, Why
from ..closed_world.audit import Audit
from ..geometry.data_bounds import Root
from ..prefetch import prefetch
from ..prefetch.recording import Recording
from .call_kind import CallKind
from .calls.call import ReplayResult, call_of
from .calls.input_proxies import Call
from .calls.observers import observer
from .calls.structures import MISSING
from .captured_model import ROWS
from .few_rows import fewest_rows
from .graph_capture import GraphMemory, check_room, empty_cache, free_beside, in_trial, preserved_statistics, trial
from .graph_key import GraphKey, assert_on_one_rank, key_of, root_of
from .layer_requests import requests_of_layers
from .model_graphs import ModelGraphs, served


class GraphedModule(ModelGraphs):
    """The forward of a model that graphs serve, and when to capture another."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = None if torch.compiler.is_compiling() else self.try_replay(args, kwargs)
        if result is None:
            return self.layers(args, kwargs)
        if result.output is not MISSING:
            return result.output
        with result.watch:
            out = self.layers(args, kwargs)
        result.computed(out)
        return out

    def layers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An eager call. Where memory is out while graphs hold some, they let go of it, and the call begins again."""
        try:
            return self.run_layers(*args, **kwargs)
        except torch.OutOfMemoryError:
            if not self.graphs:
                raise
        self._out_of_memory()
        return self.run_layers(*args, **kwargs)

    def _out_of_memory(self) -> None:
        """Let go of all graphs, for good."""
        self.drop(Why.GRAPH_NO_ROOM.says())
        empty_cache()

    def may_replay(self) -> bool:
        """Whether a call may be replayed now, as far as this costs nothing to find out."""
        if self.given_up() is not None and not self.graphs:
            return False
        if self.inner is None:
            self.look_for_modules()
        if in_trial() or not (hooks.may_be_replayed(self.model) and self.allowed()):
            return False
        if hooks.torch_replaced():
            self.decline(Why.GRAPH_CHANGED, "a function of torch that layers call")
            return False
        onlooker = observer()
        if onlooker is not None:
            self.decline(Why.GRAPH_OBSERVED, onlooker)
        return onlooker is None

    def try_replay(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ReplayResult | None:
        """The replay of a call with these arguments; None where it may not be replayed."""
        if (self.other_inputs.wait and not self.other_inputs.due()) or not self.may_replay():
            return None
        try:
            call = call_of(args, kwargs, self.tensors_of, self.reads)
        except Refusal as error:
            if not self.graphs:
                self.attempts.failed()
            self.refuse(str(error))
            return None
        if call is None:
            self.decline(Why.GRAPH_NO_TENSOR)
            return None
        return self.try_call(call)

    def try_call(self, call: Call) -> ReplayResult | None:
        """The replay of a call, MISSING where no graph serves it; None where it may not be replayed."""
        tensors = self.tensors_of(call.x)
        features = None if tensors is None else tensors.features_of(call.x)
        root = Why.GRAPH_FEATURES if tensors is None else root_of(tensors, call.x, features, self)
        if isinstance(root, Why):
            self.decline(root)
            if root in (Why.GRAPH_HAS_MAPS, Why.GRAPH_COORDINATES) and not (self.asked or self.graphs):
                self.other_inputs.failed()
            return None
        self.other_inputs.failures = 0
        assert tensors is not None and features is not None  # `root_of` has seen them
        with self.speculation.launch(self, root, features):
            if self.possible():
                self.hindered.learn(True)
                key = self.complete_key(key_of(tensors, call.x, features, (call.constants, root.known)))
                if self.box_columns:
                    key = key._replace(label=(key.label, root.ends(self.box_columns)))
                return self.serve(self.kind_of(key), key, call, root)
            self.speculation.confirm(None)
            self.hindered.failed()
            self.decline(Why.GRAPH_HOOKS)
            return None

    def serve(self, kind: CallKind, key: GraphKey, call: Call, root: Root) -> ReplayResult:
        """A call of `kind`, by one of its graphs, or eager."""
        graphs = self._graphs_for(kind, root)
        self.speculation.confirm(graphs[0] if graphs else None)
        for graph in graphs:
            due = (kind.comparison_due(graph) and self._fits(kind, root)) or len(root.coords) < graph.least
            if due or not graph.captured.differing_columns(root) <= kind.verified:
                self.computed(compared=self.trains)
                call = self.before_layers(call)
                return ReplayResult(MISSING, functools.partial(self.compare, kind, graph, call, root))
            try:
                output = self.execute(graph, call, root)
            except torch.OutOfMemoryError:  # for the copy of what it has computed
                if self.trains or graph.alters:  # the layers would move statistics once more
                    raise
                self._out_of_memory()
                return ReplayResult(MISSING)
            if output is MISSING:  # a level has more rows than the graph has memory for, or tensors moved
                continue
            self.hits += 1
            self.latest, kind.served = kind, self.hits
            kind.replayed(graph, len(root.coords))
            served(self, root.coords)
            self.replayed()
            return ReplayResult(output)
        return self._warm_up(kind, key, call, root)

    def _graphs_for(self, kind: CallKind, root: Root) -> list[Any]:
        """The graphs that may serve the call, the smallest first; none where it has to be eager."""
        if not kind.graphs:
            return []
        if not kind.holds():
            assert kind.guards is not None
            self.decline(Why.GRAPH_CHANGED, kind.guards.changed())
            kind.forget_trial()
            return []
        graphs = [graph for graph in kind.serving(len(root.coords)) if graph.maps.serves(root.box)]
        return [] if kind.smaller_due(len(root.coords)) else graphs

    def _warm_up(self, kind: CallKind, key: GraphKey, call: Call, root: Root) -> ReplayResult:
        """A call that no graph serves: eager; watched, or recorded, where an attempt is due."""
        self.computed()
        graphs = kind.serving(len(root.coords))
        for why in filter(None, [graph.maps.padded_input.refusal for graph in graphs]):
            self.decline(why)
            return ReplayResult(MISSING)
        if not graphs and not self._fits(kind, root):
            self.leave_room()
        kind.most_rows = max(kind.most_rows, len(root.coords))
        self.check_kinds(kind)
        if not kind.attempts.due() or self.given_up() is not None:
            return ReplayResult(MISSING)
        self.look_for_modules()
        try:
            assert_on_one_rank(self.modules)
            if kind.holds():
                if call.repeatable():
                    record = functools.partial(self.record, kind, key, self.before_layers(call), root.for_steps(True))
                    return ReplayResult(MISSING, record)
                self.rerun_due = True
                return ReplayResult(MISSING)
        except Refusal as error:
            self.failed(error)
            return ReplayResult(MISSING)
        if not self._settles(kind):
            return ReplayResult(MISSING)
        audit = Audit(self.model, key.tensors)

        def watched(_: Any) -> None:
            try:
                kind.guards = audit.guards()
                self.rerun_due = True
            except Exception as error:  # the program has its result
                self.failed(error)

        return ReplayResult(MISSING, watched, audit)

    def _settles(self, kind: CallKind) -> bool:
        """Whether to watch a call, as guards do not hold; where they never do, the model gives up: parts may."""
        if kind.guards is not None:
            self.decline(Why.GRAPH_CHANGED, kind.guards.changed())
            kind.changes.failed()
            if kind.changes.over and not self.graphs:
                self.drop(str(self.declined))
        return not kind.changes.over

    def _fits(self, kind: CallKind, root: Root) -> bool:
        """Whether an eager call probably fits beside the graphs. A step that does not runs out of memory in its
        backward pass, where nobody can begin it again."""
        largest = kind.graphs[-1:]  # another thread may let go of it
        return not self.trains or all(
            free_beside(graph.nbytes) >= graph.nbytes * len(root.coords) / graph.capacity for graph in largest
        )

    def compare(self, kind: CallKind, graph: Any, call: Call, root: Root, out: Any) -> None:
        """Replay a call for which the layers have returned `out`. Where both agree bit for bit (gradients: within
        rounding), graphs of its kind are trusted in the columns of the box in which it differs; else they go."""
        columns = graph.captured.differing_columns(root)
        try:
            if self.trains and not call.may_run_again():  # as a comparison of a step has it do
                raise Refusal(Why.GRAPH_FRONT)
            with trial(), torch.no_grad(), preserved_statistics(self.model):
                if self.replay_and_compare(graph, call, root, out):
                    kind.verified |= columns
                    graph.least = min(graph.least, len(root.coords))
                    self.rerun_due = False
                else:
                    kind.comparison_showed_nothing()
        except Refusal as error:
            self._differs(kind, root, columns, error)
        except torch.OutOfMemoryError:
            self._out_of_memory()
        except Exception as error:  # the program has its result, and goes on
            self.drop(Why.GRAPH_ERROR.says(type(error).__name__, error), logging.WARNING)

    def _differs(self, kind: CallKind, root: Root, columns: set[int], error: Refusal) -> None:
        if error.verdict is Verdict.UNDECIDED:
            self.rerun_due = self.rerun_due or error.why is Why.GRAPH_FRONT  # the next call shows what it did
            return
        if columns <= kind.verified or error.verdict is Verdict.FINAL:
            self.drop(Why.GRAPH_DIFFERS.says(error), logging.WARNING)
            return
        if columns == {ROWS}:
            self.attempts.failed()
            self.refuse(str(error))
        elif columns:
            self.box_columns |= {*range(len(root.box.size))}
        self.forget_graphs()

    def launch_speculatively(self, graph: Any, root: Root, features: torch.Tensor) -> bool:
        """Queue what a graph does with features behind its maps, where this can be undone."""
        columns, own = graph.captured.differing_columns(root), graph.features
        taken = (features.dtype, features.shape[1:]) == (own.dtype, own.shape[1:]) and columns <= graph.verified
        if graph.alters or not taken or columns & self.box_columns:  # it would write behind its own grid
            return False
        graph.run(features)
        graph.maps.memory.used()
        return True

    def before_layers(self, call: Call) -> Call:
        """`call`, and what a comparison with the layers will want to know of the time before them."""
        return call

    @abc.abstractmethod
    def replay_and_compare(self, graph: Any, call: Call, root: Root, out: Any) -> bool:
        """Raise Refusal where a graph computes something else than the layers, which returned `out`; False where it
        cannot serve the call."""

    def complete_key(self, key: GraphKey) -> GraphKey:
        """`key`, and what else counts."""
        return key

    @abc.abstractmethod
    def execute(self, graph: Any, call: Call, root: Root) -> Any:
        """The model's output, or MISSING where the graph cannot serve the call."""

    @abc.abstractmethod
    def record_graph(
        self, kind: CallKind, key: GraphKey, recording: Recording, capacity: int, call: Call, root: Root, out: Any
    ) -> Any:
        """A new graph for calls like this one, which returned `out`; None: not of this input. Without
        a trial where `kind` has had one. recording: of inputs like it.  Raises Refusal."""

    def recorded(self, graph: Any, call: Call, out: Any) -> None:
        """A graph was captured after a call that returned `out`."""

    def recording(self, key: GraphKey, call: Call, root: Root) -> Recording | None:
        """Of inputs like that of the call; None where it asks for no maps. Raises Refusal."""
        alone = root.known or root.coords.is_inference()  # layers may have asked for each map as for a first one
        recording = None if alone else prefetch.recording_of(key.device, root.box, self.trains, len(root.coords))
        return recording or requests_of_layers(self, key, call, root)

    def record(self, kind: CallKind, key: GraphKey, call: Call, root: Root, out: Any) -> None:
        """Capture a graph for calls like this one, which returned `out`, in the place of the kind's own."""
        if not kind.holds():
            return
        try:
            with self.lock, torch.cuda.device(key.device), trial():
                recording = self.recording(key, call, root)
                if recording is None:
                    if not self.graphs:  # else others will be captured again
                        self.inconclusive.failed()
                    return
                self.wait_for_last_replay()  # a trial replays maps in the memory that the graphs share
                self.speculation.discard()
                capacity = kind.capacity_for(len(root.coords))
                kind.make_room(capacity)
                self.latest = self.holder = None
                self.make_place(kind)
                if self.memory is None or not self.graphs or self.memory.full():
                    self.drop_graphs()
                    self.memory = GraphMemory(key.device, self.memory)  # it lasts as long as the graphs do
                empty_cache()
                peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
                under_way = torch.cuda.memory_allocated() if self.trains else 0
                guards = len(self.reads), self.box_columns
                try:
                    graph = self.record_graph(kind, key, recording, capacity, call, root, out)
                    if graph is not None:
                        graph.least = fewest_rows(self, graph, call, root)
                finally:
                    self.memory.used()
                empty_cache()  # what the trial took
                if graph is not None:
                    graph.nbytes = check_room(peak, reserved, under_way)
                    self.undecided = self.declined = None
                    self.inconclusive.learn(True)
                    kind.take(graph, capacity)
                    self.latest, self.rerun_due = kind, False
                    self.recorded(graph, call, out)
                elif (len(self.reads), self.box_columns) == guards:
                    self.inconclusive.failed()
            return
        except Exception as error:  # a model may do anything at all in there; it runs as it did
            refusal = error if isinstance(error, Refusal) else Refusal(Why.GRAPH_ERROR, type(error).__name__, error)
            graph = kind.trial = None  # the next attempt makes one: it takes all that a capture must find there
            if kind.graphs and (refusal.why is Why.GRAPH_NO_ROOM or isinstance(error, torch.OutOfMemoryError)):
                kind.room_for_two = False  # the large one serves
            else:
                self.failed(refusal)
            del refusal  # it may be the error, which keeps this frame
        empty_cache()  # what was captured lies in a pool of its own, where nothing else could use it

    def needs_more_guards(self, n_reads: int, columns: frozenset[int]) -> bool:
        """Whether calls must be told apart by more: a trial read more than `n_reads` entries, or follows the box."""
        before, self.box_columns = self.box_columns, self.box_columns | columns
        return len(self.reads) > n_reads or self.box_columns > before
