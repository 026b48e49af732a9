"""The graphs of a model: which there are, what is queued for the next call, and why there are no more.

The graph that is likely to serve a call is queued, maps first, before the checks of the call are
through: on a GPU's host those take as long as the maps do. A framework that looks for equal rows when a tensor is
made queues a table for that and waits. Where such tensors have gone to a replayed model, the captured maps of that
model show whether rows are equal, too. They are queued instead, and are ready when the model is called.
"""

from __future__ import annotations

import abc
import logging
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from ... import hooks, log, policy, settings, state
from ...hooks import ModelReference
from ...refusals import Refusal, Verdict, Why
from ..geometry.data_bounds import Root
from ..maps.coordinate_map import CoordinateMap
from ..maps.map_cache import MapStore
from ..prefetch import prefetch
from . import padded
from .call_kind import CallKind
from .calls.number_tensors import NumberTensors
from .calls.structures import Tensors
from .graph_capture import GraphMemory, empty_cache
from .graph_key import GraphKey, addresses, difference
from .speculative_launch import SpeculativeLaunch

_Category = tuple[torch.device, int, Hashable]  # of inputs: device, columns, and the name they are announced under


class ModelGraphs(ModelReference, abc.ABC):
    """The graphs of a model by kinds of calls, the memory that they share, and what stands in the way of more: it is
    remembered for `report()`, and said once in the log.

    hindered: calls that hooks stood against, or modes of modules.  vain: graphs that went for those of another kind
    before they had served many calls.  attempts: captures, until too many failed.  inconclusive: captures without maps,
    or with a trial that showed nothing.  other_inputs: looks at inputs that no graph serves, while there is none.
    moves: of parameters in memory, without a replay between them.  reason: why a capture failed.  undecided: why the
    last trial showed nothing.  declined: why the last call that might have been replayed was not.
    """

    reason: str | None
    undecided: str | None
    declined: str | None
    trains = False  # whether calls compute gradients

    def __init__(self, model: nn.Module, tensors_of: Callable[[Any], Tensors | None], asked: bool = True) -> None:
        """tensors_of: the framework of a sparse tensor, None for other objects.  asked: the program wants this
        model replayed."""
        super().__init__(model)
        self.tensors_of, self.asked = tensors_of, asked
        self.inner: list[nn.Module] | None = None  # all modules of the model but itself, once it is called
        self.kinds: dict[GraphKey, CallKind] = {}
        self.latest: CallKind | None = None  # of the call that a graph served last
        self.holder: object = None  # the token of the step whose backward pass the graphs' memory is for
        self.hits = 0
        # Columns of an input's box that tell kinds of calls apart; ITEMS where each batch item has to have rows.
        self.box_columns = frozenset[int]()
        # replays since the last eager call; whether that was a compared step; how often memory went back after others
        self._streak, self._compared = policy.REPLAYS_SETTLED, False
        self._returns = policy.Attempts(policy.MEMORY_RETURNS)
        self.attempts = policy.Attempts(policy.CAPTURE_FAILURES)
        self.inconclusive = policy.Attempts(policy.CAPTURE_INCONCLUSIVE)
        self.hindered, self.vain = policy.Attempts(policy.HINDERED), 0
        self.last_key: GraphKey | None = None  # of the last call; what tells the last new kind from the call before it
        self.difference = ""
        self.other_inputs = policy.Attempts(policy.OTHER_INPUTS)
        self.moves, self._hits_before = policy.Attempts(policy.CAPTURE_CHANGES), 0
        self.reason = self.undecided = self.declined = None
        self.rerun_due = False  # a capture or a comparison waits for a call that may run twice up to its sparse tensor
        self.reads: set[Any] = set()  # what the model reads of dictionaries
        self.numbers = NumberTensors()
        self.memory: GraphMemory | None = None
        self.stream: torch.cuda.Stream | None = None  # of the last replay
        self.lock, self.speculation = threading.RLock(), SpeculativeLaunch()

    @property
    def modules(self) -> list[nn.Module]:
        """Of the model, itself first; [] until it is called."""
        return [] if self.inner is None else [self.model, *self.inner]

    def look_for_modules(self) -> None:
        """Learn the modules of the model: before a capture again, as a program may add some."""
        self.inner = list(self.model.modules())[1:]

    @property
    def graphs(self) -> list[Any]:
        """Of all kinds."""
        return [graph for kind in list(self.kinds.values()) for graph in kind.graphs]

    @abc.abstractmethod
    def allowed(self) -> bool:
        """Whether nothing stands against a replay but, perhaps, the modules."""

    @abc.abstractmethod
    def possible(self) -> bool:
        """Whether the modules, which are known, do not stand against a replay."""

    def start(self, graph: Any, root: Root) -> None:
        """Queue the maps over an input, unless they are: under the lock, on its device."""
        if self.speculation.started is not graph:
            self.wait_for_last_replay()
            self.speculation.undo()
            self.speculation.discard()
            self.holder = None
            graph.maps.start(root.coords, root.bounds)
            graph.maps.memory.used()

    def parameters_moved(self, graph: Any) -> bool:
        """Whether what a graph reads has moved, so that none is of use. Slow: ask when launches are queued."""
        if graph.parameters == addresses(self.modules):
            return False
        for kind in self.kinds.values():
            kind.forget_trial()
        self.latest = None
        self.moves.learn(self.hits > self._hits_before)
        self._hits_before = self.hits
        self.decline(Why.GRAPH_CHANGED, "where its parameters lie in memory")
        if self.moves.over:
            self.drop(str(self.declined))
        return True

    def wait_for_last_replay(self) -> None:
        """All graphs of a model share their memory: the current stream goes on where the last replay was queued."""
        stream = torch.cuda.current_stream()
        if self.stream is not None and stream != self.stream:
            stream.wait_stream(self.stream)
        self.stream = stream

    def computed(self, compared: bool = False) -> None:
        """A call is eager. compared: a step that a graph would have served, after which replays go on."""
        self._streak, self._compared = 0, compared

    def replayed(self) -> None:
        """A graph served a call. What eager calls left in the allocator's cache is given back: at once after a compared
        step, which leaves as much as a graph takes; else once such calls are over, and a few times in all, as the next
        one allocates anew."""
        self._streak += 1
        settled = self._streak == policy.REPLAYS_SETTLED and self._returns.due()
        if settled or (self._streak == 1 and self._compared):
            empty_cache()

    def given_up(self) -> str | None:
        """Why nothing is captured any more, if so."""
        if self.attempts.over:
            return self.reason
        if self.other_inputs.over:
            return self.declined
        if self.inconclusive.over and not self.graphs:
            return self.undecided or Why.GRAPH_NOT_PREFETCHED.says()
        return self._new_kinds() if self.serves_few() else None

    def _new_kinds(self) -> str:
        return Why.GRAPH_NEW_KINDS.says(len(self.kinds), self.hits, self.difference)

    def serves_few(self) -> bool:
        """Whether there are more kinds of calls than calls that were replayed, or more that keep coming than are kept,
        so that graphs take each other's place too soon."""
        vain = self.vain if self.vain >= policy.VAIN_GRAPHS else 0
        new = len(self.kinds) >= policy.CALL_KINDS and len(self.kinds) >= self.hits
        return new or vain * policy.REPLAYS_SETTLED > self.hits

    def kind_of(self, key: GraphKey) -> CallKind:
        """The kind of calls like this. Of too many, those that no graph serves are forgotten."""
        kind = self.kinds.get(key)
        if kind is None:
            if len(self.kinds) >= policy.KINDS_KEPT:
                self.kinds = {key: kind for key, kind in list(self.kinds.items()) if kind.graphs}
            kind = self.kinds.setdefault(key, CallKind())
            self.difference = "" if self.last_key is None else difference(self.last_key, key)
        self.last_key = key
        return kind

    def check_kinds(self, kind: CallKind) -> None:
        """Say where calls are of ever more kinds, and let go of graphs that serve few of them: parts of the model may
        be told apart by less."""
        if len(self.kinds) > policy.GRAPHS and not kind.graphs:
            self.decline(Why.GRAPH_NEW_KINDS, len(self.kinds), self.hits, self.difference)
        if self.graphs and self.serves_few() and not self.asked:
            self.leave_room()

    def make_place(self, kind: CallKind) -> None:
        """Before a capture for `kind`: of as many others as are kept, the one that has not served for longest goes."""
        others = [other for other in self.kinds.values() if other.graphs and other is not kind]
        if len(others) >= policy.GRAPHS:
            oldest = min(others, key=lambda other: other.served)
            self.vain += oldest.replays < policy.REPLAYS_SETTLED
            oldest.drop_graphs()

    def drop(self, reason: str, level: int | None = None) -> None:
        """Replay no more. level: of the line in the log."""
        self.attempts.give_up()
        self.forget_graphs()
        self.refuse(reason, level)

    def gone(self) -> None:
        """Graphs go with the model, and the dictionaries of modules that guards look into."""
        for kind in self.kinds.values():
            kind.forget_trial()
            kind.guards = None
        self.forget_graphs()

    def drop_graphs(self) -> None:
        """Let go of the graphs of all kinds, which may be captured again."""
        for kind in self.kinds.values():
            kind.drop_graphs()

    def leave_room(self) -> None:
        """Let go of all graphs, which are captured again."""
        with self.lock:
            self.drop_graphs()
            self.latest = self.holder = None
        empty_cache()

    def forget_graphs(self) -> None:
        """Begin anew with kinds of calls."""
        self.kinds.clear()
        self.latest = None

    def failed(self, error: Exception) -> None:
        """An audit, a trial or a capture ended with it."""
        refusal = error if isinstance(error, Refusal) else Refusal(Why.GRAPH_ERROR, type(error).__name__, error)
        refusal.__traceback__ = None  # what refused keeps it: its frames would keep the call's tensors
        if refusal.verdict is Verdict.UNDECIDED:
            self.inconclusive.failed()
            self.undecided = str(refusal)
            self._say("undecided", self.undecided)
        else:
            self.attempts.failed()
            if refusal.verdict is Verdict.FINAL:
                self.attempts.give_up()
            self.refuse(str(refusal))

    def refuse(self, reason: str, level: int | None = None) -> None:
        """Remember why this was not replayed, and say so once. level: of the line in the log."""
        self.reason = reason
        self._say("replay", reason, level)

    def why(self) -> str | None:
        """What stands in the way of replays, or did."""
        return self.reason or self.undecided or self.declined

    def decline(self, why: Why, *details: Any) -> None:
        """Remember why this call is left alone; calls to come need not be."""
        reason = why.says(*details)
        if reason != self.declined:
            self.declined = reason
            self._say(why.name, reason, logging.INFO)

    def _say(self, topic: str, reason: str, level: int | None = None) -> None:
        """level: else a warning where somebody asked for replays."""
        if level is None:
            asked = self.asked or settings.get().optimize == "graphs"
            level = logging.WARNING if asked else logging.INFO
        name = type(self.model).__name__
        text = f"{name} is not replayed from a graph: {reason}"
        log.once((topic, type(self).__name__, name), text, level)


_announced = threading.local()  # .last: the coordinates that this thread announced last, and their category
_owners: dict[_Category, weakref.ref[ModelGraphs]] = {}


@state.owns
def forget() -> None:
    """Drop the owners of all categories."""
    _owners.clear()
    _announced.last = None


def announced(store: MapStore, cmap: CoordinateMap, name: Hashable) -> None:
    """Prepare the maps that such inputs need, before the first request: by the graph that will probably
    serve them, else by maps of their own."""
    category = cmap.device, cmap.coords.shape[1], name
    _announced.last = weakref.ref(cmap.coords), category
    reference = _owners.get(category)
    owner = None if reference is None else reference()
    new = cmap.unbounded and padded.current() is None and not hooks.traced()
    if owner is not None and new and owner.speculation.launch_announced(owner, cmap):
        cmap.validate(cmap.n_rows, cmap.n_rows, False)  # the graph has seen that rows are distinct
        return
    prefetch.announced(store, cmap, name)


def served(owner: ModelGraphs, coords: torch.Tensor) -> None:
    """Learn that a replay of `owner` served an input: the next ones that are announced so may be its own."""
    last = getattr(_announced, "last", None)
    if last is not None and last[0]() is coords:
        if len(_owners) >= policy.ANNOUNCED_KINDS:
            _owners.clear()
        _owners[last[1]] = weakref.ref(owner)
