"""A model and its graphs: which calls may be replayed, and when a graph is captured.

A kind of calls goes through the states that torch's CUDA graph trees name. Warm-up: the first calls run
eagerly, and one of them is watched, which tells whether a replay can be noticed. Recording: the next call is
captured, over memory for more rows than any call so far had; a second graph, for fewer rows, follows where many
calls are small. Execution: one graph or the other serves all calls, whatever their rows. Now and then a call
that could be replayed runs eagerly as well, and both results are compared.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ... import hooks, policy
from ...refusals import Refusal, Why
from ..geometry.boxes import Box
from ..prefetch import prefetch
from ..prefetch.recording import Recording
from ..prefetch.traces import untraced
from .calls import announced_inputs
from .calls.call import ReplayResult, call_of
from .calls.call_kind import CallKind
from .calls.input_proxies import Call
from .calls.observers import observer
from .calls.structures import MISSING, Tensors
from .captured_model import CaptureContext
from .closed_world.audit import Audit
from .comparison import compare, comparison_due
from .graph_capture import CacheTrimmer, GraphMemory, check_room, empty_cache, in_trial, trial
from .graph_key import GraphKey, Root, addresses, key_of, root_of
from .graph_maps import SpeculativeLaunch
from .padded import PaddedInput
from .reasons import Reasons


@contextlib.contextmanager
def _untraced_in(audit: Audit) -> Iterator[None]:
    with untraced(), audit:
        yield


class GraphedModule(Reasons, abc.ABC):
    """The graphs of a model, by kinds of calls, and when to capture another.

    forward: the model's own.  tensors_of: the framework of a sparse tensor, None for other objects.
    """

    in_place_of = None
    trains = False  # whether calls compute gradients

    def __init__(
        self, model: nn.Module, forward: Callable[..., Any], tensors_of: Callable[[Any], Tensors | None]
    ) -> None:
        self.model, self.forward, self.tensors_of = model, forward, tensors_of
        self._forget()

    def _forget(self) -> None:
        self.modules: list[nn.Module] = []  # of the model, once it is called
        self.kinds: dict[GraphKey, CallKind] = {}
        self.latest: CallKind | None = None  # of the call that a graph served last
        self.holder: object = None  # the token of the step whose backward pass the graphs' memory is for
        # by_box: a graph for every box; where the model looks at bounds
        self.hits, self.trimmer, self.by_box = 0, CacheTrimmer(), False
        self.forget_reasons()
        self.reads: set[Any] = set()  # what the model reads of dictionaries
        self.memory: GraphMemory | None = None
        self.stream: torch.cuda.Stream | None = None  # of the last replay
        self.lock, self.speculation = threading.RLock(), SpeculativeLaunch()

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles of a model begin anew."""
        names = {"model", "forward", "tensors_of", *self._carried}
        return {name: value for name, value in self.__dict__.items() if name in names}

    _carried: tuple[str, ...] = ()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

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
            return self.forward(*args, **kwargs)
        except torch.OutOfMemoryError:
            if not self.graphs:
                raise
            self.drop(Why.GRAPH_NO_ROOM.says())
        empty_cache()
        return self.forward(*args, **kwargs)

    @property
    def graphs(self) -> list[Any]:
        """Of all kinds."""
        return [graph for kind in list(self.kinds.values()) for graph in kind.graphs]

    def may_replay(self) -> bool:
        """Whether a call may be replayed now, as far as this costs nothing to find out."""
        if self.given_up() is not None and not self.graphs:
            return False
        self.modules = self.modules or list(self.model.modules())
        if in_trial() or not (hooks.may_be_replayed(self.model) and self.allowed()):
            return False
        onlooker = observer()
        if onlooker is not None:
            self.decline(Why.GRAPH_OBSERVED, onlooker)
        return onlooker is None

    def try_replay(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ReplayResult | None:
        """The replay of a call with these arguments; None where it may not be replayed."""
        if not self.may_replay():
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
        root = Why.GRAPH_FEATURES if tensors is None else root_of(tensors, call.x)
        if isinstance(root, Why):
            self.decline(root)
            return None
        assert tensors is not None
        features = tensors.features_of(call.x)
        assert features is not None  # `root_of` has seen them
        with self.speculation.launch(self, root, features):
            if self.possible():
                key = self.complete_key(key_of(tensors, call.x, call.constants))
                if self.by_box:
                    key = key._replace(label=(key.label, root.box))
                return self.serve(self.kinds.get(key) or self.kinds.setdefault(key, CallKind()), key, call, root)
            self.speculation.confirm(None)
            self.decline(Why.GRAPH_HOOKS)
            return None

    def start(self, graph: Any, root: Root) -> None:
        """Queue the maps over an input, unless they are: under the lock, on its device."""
        if self.speculation.started is not graph:
            self.wait_for_last_replay()
            self.speculation.discard()
            self.holder = None
            graph.maps.start(root.coords, root.bounds)

    def launch_speculatively(self, graph: Any, root: Root, features: torch.Tensor) -> bool:
        """Queue what a graph does with features behind its maps, where nobody else can notice."""
        return False

    def serve(self, kind: CallKind, key: GraphKey, call: Call, root: Root) -> ReplayResult:
        """A call of `kind`, by one of its graphs, or eager."""
        graphs = self._graphs_for(kind, root)
        self.speculation.confirm(graphs[0] if graphs else None)
        for graph in graphs:
            if not graph.captured.differing_columns(root) <= kind.verified or comparison_due(graph):
                self.trimmer.computed()
                return ReplayResult(MISSING, functools.partial(compare, self, kind, graph, call, root), untraced())
            output = self.execute(graph, call, root)
            if output is MISSING:  # a level has more rows than the graph has memory for, or tensors moved
                continue
            self.hits += 1
            self.latest, kind.served = kind, self.hits
            kind.replayed(graph, len(root.coords))
            announced_inputs.replayed(self, root.coords)
            self.trimmer.replayed()
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
        n_rows = len(root.coords)
        graphs = [] if kind.smaller_due(n_rows) else kind.serving(n_rows)
        return [graph for graph in graphs if graph.maps.serves(root.box)]

    def _warm_up(self, kind: CallKind, key: GraphKey, call: Call, root: Root) -> ReplayResult:
        """A call that no graph serves: eager; watched, or recorded, where an attempt is due."""
        self.trimmer.computed()
        kind.most_rows = max(kind.most_rows, len(root.coords))
        due = kind.attempts.due()
        if self.given_up() is not None or (kind.attempts.failures and not due):
            return ReplayResult(MISSING)
        if not due:
            return ReplayResult(MISSING, watch=untraced())
        if kind.holds():
            return ReplayResult(MISSING, lambda out: self.record(kind, key, call, root, out), untraced())
        audit = Audit(self.model, key.tensors)

        def watched(_: Any) -> None:
            try:
                kind.guards = audit.guards()
            except Refusal as error:
                self.failed(error)

        return ReplayResult(MISSING, watched, _untraced_in(audit))

    def executed_values(self, graph: Any, call: Call, root: Root) -> list[Any] | None:
        """The values of the output by a graph; None where it cannot serve the call."""
        raise NotImplementedError

    def compare_gradients(self, graph: Any, call: Call, root: Root) -> None:
        """Raise Refusal where gradients by the graph are not those of the layers."""
        return

    @abc.abstractmethod
    def allowed(self) -> bool:
        """Whether nothing stands against it but, perhaps, the modules."""

    @abc.abstractmethod
    def possible(self) -> bool:
        """Whether the modules, which are known, do not stand against it."""

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

    def recording(self, key: GraphKey, root: Root) -> Recording | None:
        """Of the last input in its box; None where inputs do not all have the same requests for now."""
        return prefetch.recording_of(key.device, root.box, self.trains)

    def parameters_moved(self, graph: Any) -> bool:
        """Whether what a graph reads has moved, so that none is of use. Slow: ask when launches are queued."""
        if graph.parameters == addresses(self.modules):
            return False
        for kind in self.kinds.values():
            kind.forget_trial()
        self.latest = None
        return True

    def wait_for_last_replay(self) -> None:
        """All graphs of a model share their memory: the current stream goes on where the last replay was queued."""
        stream = torch.cuda.current_stream()
        if self.stream is not None and stream != self.stream:
            stream.wait_stream(self.stream)
        self.stream = stream

    def record(self, kind: CallKind, key: GraphKey, call: Call, root: Root, out: Any) -> None:
        """Capture a graph for calls like this one, which returned `out`, in the place of the kind's own."""
        recording = self.recording(key, root)
        if recording is None and not self.graphs:  # which may be over soon: graphs stay, and may be captured again
            self.inconclusive.failed()
        if recording is None or not kind.holds():
            return
        try:
            with self.lock, torch.cuda.device(key.device), trial():
                self.wait_for_last_replay()  # a trial replays maps in the memory that the graphs share
                self.speculation.discard()
                capacity = kind.capacity_for(len(root.coords))
                kind.make_room(capacity)
                self.latest = self.holder = None
                others = [other for other in self.kinds.values() if other.graphs and other is not kind]
                if len(others) >= policy.GRAPHS:
                    min(others, key=lambda other: other.served).drop_graphs()
                self.memory = self.memory if self.graphs else GraphMemory(key.device)  # it lasts as long as they do
                empty_cache()
                peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
                guards = len(self.reads), self.by_box
                graph = self.record_graph(kind, key, recording, capacity, call, root, out)
                empty_cache()  # what the trial took on a stream of its own
                if graph is not None:
                    check_room(peak, reserved)
                    self.undecided = self.declined = None
                    self.inconclusive.learn(True)
                    kind.take(graph, capacity)
                    self.latest = kind
                elif (len(self.reads), self.by_box) == guards:
                    self.inconclusive.failed()
        # A model may do anything at all in there; it runs as it did.
        except Exception as error:
            refusal = error if isinstance(error, Refusal) else Refusal(Why.GRAPH_ERROR, type(error).__name__, error)
            if kind.graphs and (refusal.why is Why.GRAPH_NO_ROOM or isinstance(error, torch.OutOfMemoryError)):
                kind.room_for_two = False  # the large one serves
            else:
                self.failed(refusal)
            del refusal  # it may be the error, which keeps this frame

    def needs_more_guards(self, padded_input: PaddedInput, n_reads: int) -> bool:
        """Whether a trial has read more than `n_reads` entries of dictionaries, or depends on the box:
        calls must be told apart by more before a graph is captured."""
        by_box, self.by_box = self.by_box, self.by_box or bool(padded_input.grids)
        return len(self.reads) > n_reads or self.by_box > by_box

    def given_up(self) -> str | None:
        """Why nothing is captured any more, if so."""
        if self.attempts.over:
            return self.reason
        if self.inconclusive.over and not self.graphs:
            return self.undecided or Why.GRAPH_NOT_PREFETCHED.says()
        if len(self.kinds) >= max(policy.CALL_KINDS, self.hits):
            return Why.GRAPH_NEW_KINDS.says(len(self.kinds), self.hits)
        return None

    def capture_context(self, key: GraphKey, box: Box) -> CaptureContext:
        """Of a captured model."""
        return CaptureContext(key.tensors, box, self.reads, self.model, self.drop)

    def drop(self, reason: str) -> None:
        """Replay no more."""
        self.attempts.give_up()
        self.forget_graphs()
        self.refuse(reason)

    def forget_graphs(self) -> None:
        """Begin anew with kinds of calls."""
        self.kinds.clear()
        self.latest = None
