"""Maps that are queued from a trace: launch for launch what the builder queues."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import random
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_bridge import native, policy
from sparse_bridge.core.prefetch import input_memory, prefetch, traces
from sparse_bridge.core.prefetch.batched_builder import BatchedBuilder
from sparse_bridge.kernels.maps import mask_order, row_ranks
from sparse_bridge.kernels.maps.neighbor_table import NeighborTable
from sparse_bridge.kernels.maps.tile_list import TileList
from sparse_bridge.kernels.runtime import parts
from sparse_bridge.kernels.runtime.parts import Part
from tests.core.prefetch import map_time


class Memory(TorchDispatchMode):
    """The memory that torch hands out, which stays, and the numbers that are sent there."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[torch.UntypedStorage] = []
        self.known: set[int] = set()
        self.sent: dict[int, list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in self.known:
                self.known.add(one.untyped_storage().data_ptr())
                self.blocks.append(one.untyped_storage())
        return made

    def told(self, number: Any) -> Any:
        """A number; of an address, which block it is in, where, and what was sent there."""
        for place, block in enumerate(self.blocks):
            at = block.data_ptr()
            if type(number) is int and at <= number < at + max(1, block.nbytes()):
                return place, number - at, tuple(map(self.told, self.sent.get(number, ())))
        return number

    def shown(self, value: Any) -> Any:
        """What a value is made of."""
        if isinstance(value, torch.Tensor):
            return self.told(value.data_ptr()), tuple(value.shape), value.dtype, value.stride()
        if isinstance(value, Part):
            return self.told(value.at), value.shape, value.dtype, value.step
        if isinstance(value, (NeighborTable, TileList)):
            return type(value), self.shown(value.__reduce__()[1])
        if isinstance(value, dict):
            return {key: self.shown(one) for key, one in value.items()}
        if isinstance(value, (tuple, list)):
            return tuple(map(self.shown, value))
        return self.told(value)


class Compared:
    """Whether scenes that are queued from a trace are what the builder makes of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[Any] = []
        self.made: list[Any] = []
        self.traced = 0
        own, assembled, repeated = (BatchedBuilder.build, BatchedBuilder.assembled, traces.Traces.repeated)
        tensor = torch.tensor

        def build(builder: Any) -> Any:
            copied = copy.copy(builder)
            copied.levels, copied.room, copied.expansions, copied.level_bounds, copied.exact_boxes = {}, {}, {}, [], {}
            copied.layouts, copied.traces = dict(builder.layouts), None
            for box in builder.boxes.values():
                box.layout(builder.device)  # which is sent once, as what is found below
            if builder.cmap.data_bounds is not None:
                _ = builder.cmap.data_bounds.bounds
            before = self.traced
            found, one = self._noted(own, builder)
            if self.traced > before:
                launches, made = self._noted(own, copied)[1]
                for seen, expected in zip(one[0], launches, strict=True):
                    if seen != expected:  # the difference of all of it would be a long one
                        pytest.fail(f"{seen}\n{expected}")
                if one[1] != made:
                    pytest.fail(f"{one[1]}\n{made}")
            return found

        def noted(builder: Any, *given: Any) -> Any:
            self.made = [*given]
            return assembled(builder, *given)

        def counted(traces: Any, *given: Any) -> Any:
            found = repeated(traces, *given)
            self.traced += found is not None
            return found

        def sent(values: Any, *given: Any, **named: Any) -> Any:
            made = tensor(values, *given, **named)
            if isinstance(values, list):
                self.memory.sent[made.data_ptr()] = values
            return made

        self.memory = Memory()
        for owner, name, value in (
            (BatchedBuilder, "build", build),
            (BatchedBuilder, "assembled", noted),
            (traces.Traces, "repeated", counted),
            (torch, "tensor", sent),
        ):
            monkeypatch.setattr(owner, name, value)

    def _noted(self, own: Any, builder: Any) -> tuple[Any, Any]:
        """(maps, all that was launched and made for them)."""
        self.launches, self.memory = [], Memory()
        with self.memory:
            built = own(builder)
        return built, (self.memory.shown(self.launches), self.memory.shown(self.made))

    def told(self, name: str, key: Any, *args: Any) -> None:
        self.launches.append((name, key, args))


@pytest.fixture
def few(monkeypatch):
    """All that depends on sizes changes within a few hundred rows."""
    for owner, name, value in (
        (parts, "_MOST", 4_000),
        (parts, "_LARGE", 4_000),
        (input_memory, "BATCH", 16_000),
        (mask_order, "FEW_ROWS", 150),
        (row_ranks, "FEW_ROWS", 150),
    ):
        monkeypatch.setattr(owner, name, value)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("api", "scenes", "train"),
    [(0, 30, False), (0, 20, True), (1, 20, False), (2, 14, False), (3, 14, False)],
    ids=["second", "second-training", "spconv", "torchsparse", "minkowski"],
)
def test_launches(api, scenes, train, few, rules, monkeypatch):
    """Of small and of large scenes, whose levels have any number of rows."""
    chance, compared = random.Random(api), Compared(monkeypatch)
    rules.set(policy, TRACE=policy.Schedule(skip_first=1))

    known: Any = weakref.WeakKeyDictionary()

    def rows(builder: Any, place: int, most: int) -> int:
        its: dict[int, int] = known.setdefault(builder.cmap, {})
        share = chance.uniform(0.9, 1.1) * 0.9 ** len(its)
        likely = max(1, min(most, int(share * builder.cmap.n_rows)))
        return its.setdefault(place, likely)

    networks = map_time.networks(lambda i: chance.choice([80, 240]) + chance.randint(0, 9))
    for number, (_, net, scene) in enumerate(networks):
        if number == api:
            map_time.streamed(net, scene, scenes, train, told=compared.told, rows=rows)
            break
    networks.close()
    assert compared.traced >= 4


def test_scenes_that_a_trace_serves_in_part(few, monkeypatch):
    """Their coordinates are queued from it, and then all of the scene as ever."""
    own = traces.Traces._repeated
    parts_of = []

    def in_part(traces: Any, *given: Any) -> None:
        parts_of.append(own(traces, *given))

    monkeypatch.setattr(traces.Traces, "_repeated", in_part)
    with contextlib.closing(map_time.networks(lambda i: 80)) as networks:
        _, net, scene = next(itertools.islice(networks, 2, 3))  # whose bounds are found on the way
        assert len(map_time.streamed(net, scene, 8)) == 8
    assert any(parts_of)


def test_tensors_live_as_long_as_programs_that_hold_their_addresses(few, monkeypatch):
    own, held = traces._traced, list[Any]()

    def traced(*given: Any) -> Any:
        made, tensor = own(*given), torch.zeros(1)
        held.append(weakref.ref(tensor))
        return made._replace(keep_alive=(*made.keep_alive, tensor))

    def alive() -> int:
        return sum(one() is not None for one in held)

    monkeypatch.setattr(traces, "_traced", traced)
    with contextlib.closing(map_time.networks(lambda i: 80)) as networks:
        _, net, scene = next(iter(networks))
        map_time.streamed(net, scene, 4)
    assert alive()
    prefetch.forget()
    gc.collect()
    assert not alive()


def test_scenes_are_traced_once_the_helper_is_there(few, monkeypatch):
    """A compiler may take longer than anybody waits for it."""
    own, entered, traced, there = native.module, traces.Traces._enter, list[int](), [True]

    def enter(*given: Any) -> None:
        traced.append(len(met))
        entered(*given)

    met: list[int] = []
    monkeypatch.setattr(native, "module", lambda: own() if there[0] else None)
    monkeypatch.setattr(traces.Traces, "_enter", enter)
    with contextlib.closing(map_time.networks(lambda i: 80)) as networks:
        _, net, scene = next(iter(networks))

        def counted(number: int) -> Any:
            met.append(number)
            there[0] = len(met) > 8
            return scene(number)

        map_time.streamed(net, counted, 12)
    assert traced and min(traced) > 8
