"""Groups: the layers that share a kernel map, whose dataflows are decided together.

A row order, packed tiles or pairs that one layer asks for serve all layers of the map. So a group's
winner is the set of dataflows whose products, plus what they need built once per map, take least:
`choose`. Winners are stored under the kind of map, its rows by octaves, the dtype, whether it is
trained, and the channels of all layers. `conv.choice` looks them up when a layer meets a new
map; where nothing was tuned that is one look at an empty table. Timing is `tools.group_race`'s.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from .kernel_hash import code_hash

View = tuple[str, int]  # what is built of a map for one of its sides, such as ("tiles", 0)


class Layer(NamedTuple):
    """A gather product of a group.  direction: "fwd" or "dgrad".  side: of the map whose rows are
    computed.  c_in, c_out: channels per group of the product itself."""

    direction: str
    side: int
    c_in: int
    c_out: int
    groups: int = 1

    def __str__(self) -> str:
        return f"{self.direction}{self.side}:{self.c_in}x{self.c_out}/g{self.groups}"


class MapClass(NamedTuple):
    """Maps and products that share winners.  category: "submanifold" or "other".  rows: octaves of the
    rows of both sides per compute unit.  trained: gradients are recorded over the map."""

    category: str
    n_offsets: int
    dtype: str
    precision: str
    trained: bool
    rows: tuple[int, int]

    def __str__(self) -> str:
        use = "training" if self.trained else "inference"
        rows = ":".join(map(str, self.rows))
        return f"{self.category}/v{self.n_offsets}/{self.dtype}/{self.precision}/{use}/r{rows}"

    def near(self) -> tuple[MapClass, ...]:
        """Itself, then maps of an octave more and less rows."""
        steps = (0, 1, -1)
        return tuple(self._replace(rows=(self.rows[0] + n, self.rows[1] + n)) for n in steps)


@dataclasses.dataclass(frozen=True)
class GroupWinner:
    """What serves a group.

    map_class: text of its `MapClass`.  layers: how many layers have each product, by text.  flows:
    the dataflow of each product; empty where the rules stay.  microseconds, rule_microseconds: of
    one new map, all products and all that is built for them, with these and by the rules.
    tested: timings.  code: hash of the kernels that were timed.
    """

    map_class: str
    layers: dict[str, int]
    flows: dict[str, str]
    microseconds: float
    rule_microseconds: float
    tested: int
    code: str

    @property
    def key(self) -> str:
        """What `Groups` files it under: the class of the map, and its layers in order of their names."""
        layers = "+".join(f"{name}*{count}" for name, count in sorted(self.layers.items()))
        return f"{self.map_class}/{layers}"

    def __str__(self) -> str:
        flows = ", ".join(f"{flow} for {name}" for name, flow in sorted(self.flows.items()))
        times = f"{self.microseconds:.1f} us a new map, {self.rule_microseconds:.1f} by the rules"
        return f"{self.map_class}: {flows or 'the rules stay'} ({times})"


Groups = dict[str, GroupWinner]  # by key


def decode_groups(raw: Any) -> Groups:
    """Of the "groups" of a file of winners, whose other parts are checked elsewhere.

    Raises: ValueError, KeyError, TypeError or AttributeError for anything else.
    """
    from ... import settings

    names = {field.name for field in dataclasses.fields(GroupWinner)}
    groups: Groups = {}
    for key, value in raw.items():
        if set(value) != names:
            raise ValueError(f"a group of {sorted(value)}")
        winner = GroupWinner(**value)
        counts = all(type(count) is int and count > 0 for count in winner.layers.values())
        times = winner.microseconds, winner.rule_microseconds
        if winner.key != key or not counts or not all(isinstance(t, (int, float)) for t in times):
            raise ValueError(f"a group {key!r} that does not say so of itself")
        if not set(winner.flows.values()) <= set(settings.DATAFLOWS):
            raise ValueError(f"a group of unknown dataflows {sorted(set(winner.flows.values()))}")
        groups[key] = winner
    return groups


class GroupTable:
    """The groups of one device that are in force. Those of other kernels than this version's are
    left out.  used: winners that decided about a layer of this process, by key."""

    def __init__(self, sources: Iterable[Groups]) -> None:
        self.used: Groups = {}
        self._all: Groups = {}
        self._by_layer: dict[tuple[str, str], dict[str, GroupWinner]] = {}
        self._answers: dict[tuple[MapClass, Layer], str | None] = {}
        for groups in sources:
            for winner in groups.values():
                if winner.key not in self._all:
                    self.add(winner)

    def __len__(self) -> int:
        return len(self._by_layer)

    @property
    def layers(self) -> Mapping[Any, Any]:
        """The layers that a group decides about: empty where there is none."""
        return self._by_layer

    def add(self, winner: GroupWinner) -> None:
        """Let a winner decide, in the place of an older one of the same group."""
        if winner.code != code_hash():
            return
        self._answers.clear()
        self._all[winner.key] = winner
        for layer in winner.layers:
            self._by_layer.setdefault((winner.map_class, layer), {})[winner.key] = winner

    def get(self, key: str) -> GroupWinner | None:
        """The winner of exactly this group."""
        return self._all.get(key)

    def flow(self, map_class: MapClass, layer: Layer) -> str | None:
        """The dataflow of a layer. None where the rules decide: no group of this or a neighbouring
        number of rows has it, or those that have it disagree."""
        key = map_class, layer
        if key not in self._answers:
            self._answers[key] = self._look_up(map_class, str(layer))
        return self._answers[key]

    def _look_up(self, map_class: MapClass, name: str) -> str | None:
        for near in map_class.near():
            winners = self._by_layer.get((str(near), name))
            if winners:
                flows = {winner.flows.get(name) for winner in winners.values()}
                if len(flows) > 1:
                    return None
                self.used.update(winners)
                return flows.pop()
        return None


def choose(
    layers: Mapping[Layer, int],
    times: Mapping[Layer, Mapping[str, float]],
    needs: Callable[[Layer, str], frozenset[View]],
    costs: Mapping[View, float],
    paid: frozenset[View],
) -> tuple[dict[Layer, str], float]:
    """The cheapest dataflows of a group.

    Args:
        layers: how many layers have each product.
        times: seconds of each product by each dataflow that was timed, the same for all layers.
        needs: the views of the map that a dataflow follows, with all that those are made of.
        costs: seconds to build each view once; a view without a cost is not built.
        paid: views that are built in any case, for the gradients of weights.

    Returns: (dataflow of each product, seconds for a new map).
    """
    views = {view for layer in layers for flow in times[layer] for view in needs(layer, flow)}
    open_views = sorted(view for view in views - paid if view in costs)
    best: dict[Layer, str] = {}
    least = float("inf")
    for count in range(len(open_views) + 1):
        for built in itertools.combinations(open_views, count):
            present, flows = paid | set(built), {}
            total = sum(costs[view] for view in present if view in costs)
            for layer, uses in layers.items():
                possible = [flow for flow in times[layer] if needs(layer, flow) <= present]
                if not possible:
                    break
                seconds, flows[layer] = min((times[layer][flow], flow) for flow in possible)
                total += uses * seconds
            else:
                if total < least:
                    best, least = flows, total
    return best, least
