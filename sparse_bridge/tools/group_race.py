"""Timing the dataflows of layers that share kernel maps, on the maps of a run that was watched.

For every group the products of each dataflow are compared with the rules', to the bit, and timed,
and so are the packed tiles that one of them needs of a new map. `tuning.groups.choose` adds up.
Gradients of weights follow pair lists, which are made of tiles: a trained map pays for those in any
case, and the products of wgrad change nothing.

Compiling comes first and takes what it takes; timing takes `Tuner.budget` seconds per group at
most. What was not reached in that time cannot win.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import log, settings
from ..core.conv import registry
from ..core.conv.choice import flow_of, layer_of, map_class_of
from ..core.conv.dataflow import LayerProduct
from ..core.conv.dataflows.masked import BY_RULE, kernels_of
from ..core.conv.epilogue import Epilogue
from ..core.conv.kernel_products import GatherProduct
from ..core.conv.plan import ConvPlan
from ..core.device import trace
from ..core.maps.kernel_map import KernelMap
from ..core.maps.rulebook import Rulebook
from ..core.tuning import tuner as tuners
from ..core.tuning.groups import GroupWinner, Layer, MapClass, View, choose
from ..core.tuning.kernel_hash import code_hash
from ..core.tuning.trial import device_timer, mismatch
from ..kernels.gemm.product import EpilogueForm
from ..kernels.runtime.target import Target


def _rivals() -> list[str]:
    """The dataflows of which one may take another's place."""
    return [name for name in settings.DATAFLOWS if registry.entry(name).same_sums]


@dataclasses.dataclass
class _Use:
    """A product of a group: of one layer its tensors, and how many layers have it."""

    product: LayerProduct
    weight: torch.Tensor
    count: int = 0


@dataclasses.dataclass
class Group:
    """Layers over one map that nobody gave a dataflow."""

    map_class: MapClass
    rulebook: Rulebook
    uses: dict[Layer, _Use] = dataclasses.field(default_factory=dict)

    @property
    def layers(self) -> dict[str, int]:
        """How many layers have each product, by text."""
        return {str(layer): use.count for layer, use in self.uses.items()}


class Watcher:
    """Collects the groups of the convolutions that it is shown, with their weights, of any layout and float dtype.
    Those of maps without rows, or whose rows only the device knows, stay with the rules."""

    def __init__(self) -> None:
        self.groups: dict[Any, Group] = {}

    def __call__(self, plan: ConvPlan, weight: torch.Tensor, kmap: KernelMap) -> None:
        rulebook, side = kmap.rulebook, int(kmap.flipped)
        if plan.dataflow is not BY_RULE or not all(rulebook.n_rows):
            return
        if any(rows.device is not None for rows in rulebook.rows):
            return
        product = plan.product._replace(epilogue=EpilogueForm())
        map_class = map_class_of(rulebook, product)
        group = self.groups.setdefault((rulebook, map_class), Group(map_class, rulebook))
        self._add(group, side, product, weight)
        if map_class.trained:
            back = product._replace(w=product.w.transposed())
            self._add(group, 1 - side, back, weight)

    def _add(self, group: Group, side: int, product: LayerProduct, weight: torch.Tensor) -> None:
        use = group.uses.setdefault(layer_of(side, product), _Use(product, weight.detach()))
        use.count += 1


@contextlib.contextmanager
def tuned() -> Iterator[None]:
    """Tune the groups of the convolutions that run in a `with` block, at its end, by the tuner and
    the settings in force; it leaves alone what is known."""
    watcher = Watcher()
    with trace.watch(watcher):
        yield
    tune(watcher)


def tune(watcher: Watcher) -> list[GroupWinner]:
    """Tune what was watched, and have later maps served by what won. Nothing is timed unless the
    setting is "full", nor on devices that have no clock."""
    tuner = tuners.current()
    winners: list[GroupWinner] = []
    if settings.get().tune != "full":
        return winners
    for group in watcher.groups.values():
        winner = _tune(tuner, group)
        if winner is not None:
            winners.append(winner)
    return winners


def _tune(tuner: tuners.Tuner, group: Group) -> GroupWinner | None:
    product = next(iter(group.uses.values())).product
    target = product.target
    assert target is not None
    winners = tuner.winners_of(product.device, target)
    key = GroupWinner(str(group.map_class), group.layers, {}, 0.0, 0.0, 0, "").key
    if winners is None or winners.cache is None or winners.groups.get(key) is not None:
        return None
    if tuner.timer is None and not target.raw:
        return None
    with winners.cache.claim("group", key, tuner.wait) as mine:
        if not mine:
            return None
        stored = None if tuner.again else winners.cache.contents().groups.get(key)
        if stored is not None and stored.code == code_hash():
            winners.groups.add(stored)
            return None
        try:
            with torch.no_grad():
                winner = Race(group, target, tuner).run()
        except torch.cuda.OutOfMemoryError:
            log.logger.info("no memory to tune the group %s", key)
            return None
        if winner is None:
            return None
        tuner.groups.append(winner)
        winners.groups.add(winner)
        winners.cache.store_group(winner)
        return winner


class Race:
    """One group, timed. `times` of products by layer and dataflow, `costs` of views, in seconds;
    refused: dataflows that cannot serve a product or compute something else, and why."""

    def __init__(self, group: Group, target: Target, tuner: tuners.Tuner) -> None:
        self.group, self.target, self.tuner = group, target, tuner
        self.rulebook = group.rulebook.copied()
        self.rulebook.trained = group.map_class.trained
        self.times: dict[Layer, dict[str, float]] = {layer: {} for layer in group.uses}
        self.costs: dict[View, float] = {}
        self.refused: dict[tuple[Layer, str], str] = {}
        self.tested, self.spent = 0, 0.0

    def run(self) -> GroupWinner | None:
        """None where the rules' own dataflows were not all timed."""
        rules = {layer: flow_of(self.rulebook, layer.side, use.product) for layer, use in self.group.uses.items()}
        runs = self._checked(rules)
        planned = 2 * len(runs) + 8  # timings, with those of views
        share = self.tuner.budget / planned
        for (layer, flow), run in sorted(runs.items(), key=lambda run: rules[run[0][0]] != run[0][1]):
            views = sorted(self._needs(layer, flow) - self.costs.keys())
            if self.spent + share * (1 + len(views)) > self.tuner.budget:
                continue
            for view in views:
                self._cost(view, share)
            self.times[layer][flow] = self._time(run, share)
        if any(rule not in self.times[layer] for layer, rule in rules.items()):
            return None
        return self._winner(rules)

    def _winner(self, rules: dict[Layer, str]) -> GroupWinner:
        paid = self._paid()
        layers = {layer: use.count for layer, use in self.group.uses.items()}
        flows, best = choose(layers, self.times, self._needs, self.costs, paid)
        built = paid.union(*(self._needs(layer, rule) for layer, rule in rules.items()))
        baseline = sum(self.costs.get(view, 0.0) for view in built)
        baseline += sum(layers[layer] * self.times[layer][rule] for layer, rule in rules.items())
        if best > (1 - tuners.GAIN) * baseline:
            flows, best = {}, baseline
        named = {str(layer): flow for layer, flow in flows.items()}
        return GroupWinner(
            str(self.group.map_class),
            self.group.layers,
            named,
            round(1e6 * best, 2),
            round(1e6 * baseline, 2),
            self.tested,
            code_hash(),
        )

    def _checked(self, rules: dict[Layer, str]) -> dict[tuple[Layer, str], Callable[[], object]]:
        """Products that compute what the rules' dataflow does, compiled and bound to the map."""
        runs: dict[tuple[Layer, str], Callable[[], object]] = {}
        for layer, use in self.group.uses.items():
            rule, product = rules[layer], use.product
            x = _features(self.rulebook.n_rows[1 - layer.side], product)
            inputs = x, _random_weight(use.weight)
            run = self._product(layer, rule, *inputs)
            reference = run()
            if not torch.equal(run(), reference) or not bool((reference != 0).any()):
                continue  # it proves nothing
            runs[layer, rule] = run
            for flow in _rivals():
                if flow == rule:
                    continue
                try:
                    run = self._product(layer, flow, *inputs)
                    _spoil(reference)
                    wrong = mismatch(run(), reference, product.dtype, self.group.map_class.precision, exact=True)
                except torch.cuda.OutOfMemoryError:
                    raise
                # Whatever a compiler raises: the dataflow loses.
                except Exception as error:
                    wrong = f"{type(error).__name__}: {error}"
                if wrong is None:
                    runs[layer, flow] = run
                else:
                    self.refused[layer, flow] = wrong
                    log.logger.info("%s is out of the race for %s: %s", flow, layer, wrong)
        return runs

    def _product(self, layer: Layer, name: str, x: torch.Tensor, weight: torch.Tensor) -> Callable[[], torch.Tensor]:
        product = GatherProduct(kernels_of(name), self.group.uses[layer].product)
        return functools.partial(product, self._copy(name), layer.side, x, weight, Epilogue())

    @functools.cache  # noqa: B019 - lives as long as the race
    def _copy(self, name: str) -> Rulebook:
        """The map on which a dataflow runs, with the views of that dataflow alone."""
        return self.rulebook.copied()

    def _needs(self, layer: Layer, flow: str) -> frozenset[View]:
        side = 0 if self.rulebook.symmetric else layer.side
        return frozenset({("tiles", side)} if kernels_of(flow).packed else ())

    def _paid(self) -> frozenset[View]:
        """Built whatever is chosen: what gradients of weights need."""
        return frozenset({("tiles", 0)} if self.group.map_class.trained else ())

    def _cost(self, view: View, share: float) -> None:
        """Time the building of tiles on a new map."""
        _, side = view

        def build() -> None:
            self.rulebook.copied().tiles(side, self.target)

        build()
        self.costs[view] = self._time(build, share)

    def _time(self, run: Callable[[], object], limit: float) -> float:
        start = self.tuner.clock()
        seconds = (self.tuner.timer or device_timer)(run, limit)
        self.spent += self.tuner.clock() - start
        self.tested += 1
        return seconds


def _features(n_rows: int, product: LayerProduct) -> torch.Tensor:
    generator = torch.Generator(product.device).manual_seed(0)
    return torch.randn(n_rows, product.w.columns_in, device=product.device, generator=generator).to(product.dtype)


def _random_weight(weight: torch.Tensor) -> torch.Tensor:
    """Like a layer's weight in memory, which may be zero still; itself where it overlaps."""
    random = torch.randn_like(weight)
    return random if random.stride() == weight.stride() else weight


def _spoil(like: torch.Tensor) -> None:
    """Leave memory full of NaN behind, which torch hands out again: elements that are not written
    show."""
    torch.full_like(like, float("nan"))
