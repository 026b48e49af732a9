"""A model and its graphs: which calls may be replayed, and when another graph is captured."""

from __future__ import annotations

import abc
import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from ... import log, policy
from ...refusals import Refusal, Verdict, Why
from ..conv import pending
from ..geometry.boxes import Box
from .calls import announced_inputs
from .calls.call import Call, call_of
from .calls.output_spec import MISSING
from .captured_model import ROWS, CaptureContext, Tensors, preserved_statistics
from .graph_capture import CacheTrimmer, GraphMemory, empty_cache, in_trial, trial
from .graph_key import GraphKey, Root, addresses, key_of, root_of
from .graph_maps import SpeculativeLaunch, smallest_fitting
from .padded import PaddedInput


class ReplayResult(NamedTuple):
    """output: of a replay, or MISSING: call `computed` with the output of the eager call then."""

    output: Any
    computed: Callable[[Any], None]


_order_lock = threading.Lock()


class GraphedModule(abc.ABC):
    """The graphs of a model, by what they were captured for, and when to capture another.

    forward: the model's own.  tensors_of: the framework of a sparse tensor, None for other objects.
    max_graphs: graphs, of which each holds memory.
    """

    max_graphs: int
    in_place_of = None

    def __init__(
        self, model: nn.Module, forward: Callable[..., Any], tensors_of: Callable[[Any], Tensors | None]
    ) -> None:
        self.model, self.forward, self.tensors_of = model, forward, tensors_of
        self._forget()

    def _forget(self) -> None:
        self.modules: list[nn.Module] = []  # of the model, once it is called
        self.graphs: dict[GraphKey, Any] = {}
        self.calls: dict[GraphKey, policy.Attempts] = {}
        self.captures, self.attempts = 0, policy.Attempts(policy.CAPTURE_FAILURES)
        self.inconclusive = policy.Attempts(policy.CAPTURE_INCONCLUSIVE)  # no maps, or a trial that showed nothing
        self.hits, self.trimmer = 0, CacheTrimmer()
        self.by_box = False  # a graph for every box; where the model looks at bounds
        self.reason: str | None = None  # why a capture failed
        self.undecided: str | None = None  # why the last trial showed nothing
        self.declined: Why | None = None  # why the last call that might have been captured was not
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
            return self.forward(*args, **kwargs)
        if result.output is not MISSING:
            return result.output
        out = self.forward(*args, **kwargs)
        result.computed(out)
        return out

    def may_replay(self) -> bool:
        """Whether a call may be replayed now, as far as this costs nothing to find out."""
        if not self.graphs and self.given_up() is not None:
            return False
        self.modules = self.modules or list(self.model.modules())
        return not in_trial() and self.allowed()

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
                return self._try_graph(tensors, call, root)
            self.speculation.confirm(None)
            self.decline(Why.GRAPH_HOOKS)
            return None

    def start(self, graph: Any, root: Root) -> None:
        """Queue the maps over an input, unless they are: under the lock, on its device."""
        if self.speculation.started is not graph:
            self.wait_for_last_replay()
            self.speculation.discard()
            graph.maps.start(root.coords, root.bounds)

    def launch_speculatively(self, graph: Any, root: Root, features: torch.Tensor) -> bool:
        """Queue what a graph does with features behind its maps, where nobody else can notice."""
        return False

    def _try_graph(self, tensors: Tensors, call: Call, root: Root) -> ReplayResult | None:
        key = self.complete_key(key_of(tensors, call, root))
        if self.by_box:
            key = key._replace(label=(key.label, root.box))
        graph = self.graph_for(key, root)
        self.speculation.confirm(graph)
        if graph is None:
            return ReplayResult(MISSING, lambda out: self.consider_capture(key, call, root, out))
        if not graph.captured.differing_columns(root) <= graph.verified:
            return ReplayResult(MISSING, lambda out: self._verify(key, graph, call, root, out))
        output = self.replayed(graph, call, root)
        if output is not MISSING:
            self.hits += 1
            announced_inputs.replayed(self, root.coords)
            self.trimmer.replayed()
        return ReplayResult(output, lambda _: None)

    def _verify(self, key: GraphKey, graph: Any, call: Call, root: Root, out: Any) -> None:
        """At the first input that differs in these columns: whether the graph computes what the model did."""
        columns = graph.captured.differing_columns(root)
        with trial(), torch.no_grad(), preserved_statistics(self.model):
            values = self.values(graph, call, root)
            if values is None:
                return
            try:
                graph.captured.compare(call, out, values)
                graph.verified |= columns
            except Refusal as error:
                if error.verdict is Verdict.UNDECIDED:
                    return
                if error.verdict is Verdict.FINAL:
                    raise
                if columns == {ROWS}:
                    self.attempts.failed()
                    self.refuse(str(error))
                self.by_box = self.by_box or columns != {ROWS}
                self.graphs.clear()
                self.calls.clear()

    def values(self, graph: Any, call: Call, root: Root) -> list[Any] | None:
        """The values of the output by a graph; None where it cannot serve the call."""
        raise NotImplementedError

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
    def replayed(self, graph: Any, call: Call, root: Root) -> Any:
        """The model's output, or MISSING where the graph cannot serve the call."""

    @abc.abstractmethod
    def consider_capture(self, key: GraphKey, call: Call, root: Root, out: Any) -> None:
        """A call that no graph is for has returned `out`."""

    def graph_for(self, key: GraphKey, root: Root) -> Any:
        """The smallest graph that serves an input of `key`."""
        capacity = key.capacity
        fitting = [candidate for candidate in self.graphs if candidate._replace(capacity=capacity) == key]
        key = smallest_fitting(fitting, capacity, len(root.coords)) or key
        graph = self.graphs.get(key)
        if graph is None or not graph.maps.serves(root.box):
            return None
        with _order_lock:
            used = self.graphs.pop(key, None)
            if used is not None:
                self.graphs[key] = used  # the last one used stands last
        return graph

    def parameters_moved(self, graph: Any) -> bool:
        """Whether what a graph reads has moved, so that none is of use any longer. It takes as long
        as the rest of a call's checks: ask when launches are queued."""
        if graph.parameters == addresses(self.modules):
            return False
        self.graphs.clear()
        self.calls.clear()
        return True

    def wait_for_last_replay(self) -> None:
        """All graphs of a model share their memory: the current stream goes on where the last replay was queued."""
        stream = torch.cuda.current_stream()
        if self.stream is not None and stream != self.stream:
            stream.wait_stream(self.stream)
        self.stream = stream

    def capture_when_due(self, key: GraphKey, capture: Callable[[], Any]) -> None:
        """Capture a graph where inputs of this size keep coming. capture: returns it, or None for this time."""
        self.trimmer.computed()
        if not self.calls.setdefault(key, policy.Attempts(policy.CAPTURE)).due():
            return
        if self.given_up() is not None or key in self.graphs:
            return
        if self.captures >= self.max_graphs + self.hits // policy.CALLS_PER_CAPTURE:
            self.decline(Why.GRAPH_ENOUGH)
            return
        try:
            with self.lock, torch.cuda.device(key.device), trial():
                self.wait_for_last_replay()  # a trial replays maps in the memory that the graphs share
                self.speculation.discard()
                if len(self.graphs) >= self.max_graphs:  # the one that has not served for longest
                    del self.graphs[next(iter(self.graphs))]
                if not self.graphs:  # it lasts as long as they do
                    self.memory = GraphMemory(key.device)
                guards = len(self.reads), self.by_box
                graph = capture()
                if graph is not None:
                    self.captures += 1
                    self.undecided = self.declined = None
                    self.graphs[key] = graph
                    empty_cache()  # what the trial took on a stream of its own
                elif (len(self.reads), self.by_box) == guards:
                    self.inconclusive.failed()
        except Refusal as error:
            self._failed(error)
        # A model may do anything at all in there; it runs as it did.
        except Exception as error:
            self._failed(Refusal(Why.GRAPH_ERROR, type(error).__name__, error))

    def _failed(self, refusal: Refusal) -> None:
        """A trial or a capture ended with it."""
        if refusal.verdict is Verdict.UNDECIDED:
            self.inconclusive.failed()
            self.undecided = str(refusal)
            self._say("undecided", self.undecided)
        else:
            self.attempts.failed()
            if refusal.verdict is Verdict.FINAL:
                self.attempts.give_up()
            self.refuse(str(refusal))

    def needs_more_guards(self, padded_input: PaddedInput, n_reads: int) -> bool:
        """Whether a trial has read more than `n_reads` entries of dictionaries, or depends on the box:
        calls must be told apart by more before a graph is captured."""
        by_box, self.by_box = self.by_box, self.by_box or bool(padded_input.grids)
        return len(self.reads) > n_reads or self.by_box > by_box

    def capture_in_pool(self, key: GraphKey, memory: GraphMemory, capture: Callable[[Any], Any]) -> Any:
        """The graph that `capture` makes in the pool of `memory`. A dry run measures how much memory it
        takes, and so much is reserved for the largest input so far. Where the capture learnt what
        follows layers, it is made again: a graph must not launch them twice."""
        if memory.rows < key.capacity:
            empty_cache()
            reserved = torch.cuda.memory_reserved(key.device)
            capture(torch.cuda.graph_pool_handle())  # which is dropped at once
            size = torch.cuda.memory_reserved(key.device) - reserved
            empty_cache()
            largest = max([key.capacity, *(seen.capacity for seen in self.calls)])
            memory.reserve(size * largest // key.capacity, largest)
        tries = pending.tries
        graph = capture(memory.pool)
        if pending.tries > tries:
            del graph  # before the next one wants memory
            graph = capture(memory.pool)
        return graph

    def given_up(self) -> str | None:
        """Why nothing is captured any more, if so."""
        if self.attempts.over:
            return self.reason
        if self.inconclusive.over and not self.graphs:
            return self.undecided or Why.GRAPH_NOT_PREFETCHED.says()
        if len(self.calls) >= max(policy.CALL_KINDS, self.hits):
            return Why.GRAPH_NEW_KINDS.says(len(self.calls), self.hits)
        return None

    def capture_context(self, key: GraphKey, box: Box) -> CaptureContext:
        """Of a captured model."""
        return CaptureContext(key.tensors, box, self.reads, self.model, self.drop)

    def drop(self, reason: str) -> None:
        """Replay no more."""
        self.attempts.give_up()
        self.graphs.clear()
        self.refuse(reason)

    def refuse(self, reason: str) -> None:
        """Remember why this was not replayed, and say so once."""
        self.reason = reason
        self._say("replay", reason)

    def why(self) -> str | None:
        """What stands in the way of replays, or did."""
        return self.reason or self.undecided or (self.declined and self.declined.says())

    def decline(self, why: Why) -> None:
        """Remember why this call is left alone; calls to come need not be."""
        if why is not self.declined:
            self.declined = why
            self._say(why.name, why.says(), logging.INFO)

    def _say(self, topic: str, reason: str, level: int = logging.WARNING) -> None:
        name = type(self.model).__name__
        text = f"{name} is not replayed from a graph: {reason}"
        log.once((topic, type(self).__name__, name), text, level)
