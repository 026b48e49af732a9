"""Of how few rows a graph is shown to compute what the layers do.

A program may choose by how many rows there are by way of closures, functions and objects, through which nobody
follows a number. A trial over a padded input has more rows than the call. Here are fewer, so that a limit in between
shows, and what goes by remainders of 2, 4, 8 and so on. Other numbers have to show in the source, see `closed_world`.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import torch

from ... import log
from ...errors import KernelError
from ...refusals import Refusal, Verdict, Why
from ..geometry.data_bounds import DataBounds, Root
from ..maps.coordinate_map import CoordinateMap
from .calls.index_checks import IndexChecks
from .calls.input_proxies import Call
from .calls.output_spec import OutputSpec
from .captured_maps import own_random_numbers
from .captured_model import Captured, uncached_autocast
from .comparison import ROUNDING, compare_within_rounding
from .graph_capture import preserved_statistics
from .replay_trial import PaddedModel

_FEW, _SHARE = 64, 8  # rows that are tried, and as a share of all at most one in so many
# By these and their multiples, few rows leave other remainders than all do; by 2^n a capacity leaves none.
_REMAINDERS = 2 * 3 * 5
_RUNS = 4  # of rows that follow each other, which often are neighbours


def fewest_rows(owner: Any, graph: Any, call: Call, root: Root) -> int:
    """The fewest rows of which a graph, captured at a call, is shown to compute what the layers do; those of the call
    where fewer show nothing: a program may fail with them. Raises Refusal where it computes something else.

    owner: of the graph.
    """
    features, items = owner.tensors_of(call.x).features_of(call.x), root.coords[:, 0].cpu()
    # Of all rows; where these show nothing, of each batch item, as programs take turns with them; then half of them.
    tries = [(torch.zeros_like(items), _FEW, _SHARE), (items, _FEW, _SHARE), (items, len(items), 2)]
    gradients, numbers = torch.is_grad_enabled(), own_random_numbers(features.device)
    # What is made in inference mode has no versions, by which layers tell coordinates apart.
    with preserved_statistics(owner.model), numbers, torch.inference_mode(False), torch.set_grad_enabled(gradients):
        for groups, most, share in tries[graph.maps.whole :]:
            rows = _some_rows(groups, most, share).to(features.device)
            while groups is not items and len(rows) > 1 and math.gcd(len(items) - len(rows), _REMAINDERS) > 1:
                rows = rows[:-1]
            coords = root.coords[rows]
            bounds = DataBounds(coords) if isinstance(root.bounds, DataBounds) else root.bounds
            few = root._replace(coords=coords, bounds=bounds)
            given = features.detach()[rows].requires_grad_(features.requires_grad)
            if _FewRows(owner, graph, call, few, given).shown():
                return len(rows)
    return len(items)


def _some_rows(groups: torch.Tensor, most: int, share: int) -> torch.Tensor:
    """Rows of every group, in their order. groups: int32 [N], of every row."""
    chosen: list[torch.Tensor] = []
    for group in groups.unique():
        rows = (groups == group).nonzero()[:, 0]
        wanted = max(1, min(most, len(rows) // share))
        run = torch.arange(max(1, wanted // _RUNS))
        begins = torch.linspace(0, len(rows) - len(run), min(_RUNS, wanted)).long()
        chosen.append(rows[(begins[:, None] + run).flatten()])
    return torch.cat(chosen).sort().values  # without two of one, as runs are further apart than they are long


class _FewRows:
    """Few rows of the input of a call."""

    def __init__(self, owner: Any, graph: Any, call: Call, root: Root, features: torch.Tensor) -> None:
        self.owner, self.graph, self.call, self.root, self.features = owner, graph, call, root, features

    def shown(self) -> bool:
        """Whether the graph computes what the layers do. Raises Refusal where it does not; False: this cannot be
        told."""
        expected = self._layers(self.features)
        actual = None if expected is None else self._replayed()
        if expected is None or actual is None:
            return False
        differing = [n for n, pair in enumerate(zip(expected, actual, strict=False)) if not _equal(*pair)]
        comparable = all(expected[n].shape == actual[n].shape and expected[n].is_floating_point() for n in differing)
        try:
            if len(expected) != len(actual) or not comparable:
                raise Refusal(Why.GRAPH_FEW_ROWS, len(self.features))
            self._compare([f"output {n}" for n in differing], differing, expected, actual)
        except Refusal as error:
            if error.verdict is Verdict.UNDECIDED:
                return False
            raise Refusal(Why.GRAPH_FEW_ROWS, len(self.features)) from None
        return True

    def _compare(
        self, names: list[str], numbers: list[int], expected: list[torch.Tensor], actual: list[torch.Tensor]
    ) -> None:
        """Raise Refusal unless those of these numbers differ by no more than rounding: torch multiplies few rows by
        other kernels."""
        precision = self.graph.captured.precision()

        def noisy() -> list[Any]:
            features = self.features.detach()
            noise = ROUNDING.get(precision, 1e-6) * torch.randn_like(features)
            layers = self._layers((features * (1 + noise)).requires_grad_(self.features.requires_grad))
            return [expected[n] if layers is None else layers[n] for n in numbers]

        compare_within_rounding(names, [actual[n] for n in numbers], [expected[n] for n in numbers], noisy, precision)

    def _layers(self, features: torch.Tensor) -> list[torch.Tensor] | None:
        """What they compute; None where they fail, or the program does."""
        owner, call, root = self.owner, self.call, self.root
        function = PaddedModel(owner, call, root.coords, root.box) if owner.trains else owner.run_layers
        over = owner.tensors_of(call.x).over
        start = functools.partial(over, call.x, features, CoordinateMap(root.coords, root.box))
        try:
            with IndexChecks({}, ()), uncached_autocast():
                return self._tensors(OutputSpec.of(call, function, start, set()), features)
        except (torch.OutOfMemoryError, KernelError):  # no program's
            raise
        except Exception as error:  # a program may say so of few rows to the user, too
            name, failure = type(owner.model).__name__, f"{type(error).__name__}: {error}"
            text = f"{name}: a trial with {len(features)} of its rows raised {failure}; graphs serve no fewer for now."
            log.once(("few rows", name), text, logging.INFO)
            return None

    def _replayed(self) -> list[torch.Tensor] | None:
        """What the graph computes; None where it does not serve so few."""
        graph, owner = self.graph, self.owner
        if not graph.maps.serves(self.root.box):
            return None
        owner.start(graph, self.root)
        graph.run(self.features.detach())
        rows = graph.maps.rows_over(self.root)
        if rows is None or (owner.trains and min(rows.values()) < 2):
            return None
        captured: Captured = graph.captured
        used = captured.padded_input.used
        return [tensor[: used(tensor, rows)] for tensor in self._tensors(captured.spec, captured.features)]

    def _tensors(self, spec: OutputSpec, features: torch.Tensor) -> list[torch.Tensor]:
        """Those of an output, but for what the call was given."""
        tensors = self.owner.tensors_of(self.call.x)
        given, found = (features, tensors.coordinates_of(spec.x)), list[torch.Tensor]()

        def inside(y: Any) -> None:
            found.append(tensors.features_of(y))
            if not tensors.on_rows_of(spec.x, y):
                found.append(tensors.coordinates_of(y))

        spec.for_each(tensors, found.append, inside)
        return [tensor.detach() for tensor in found if all(tensor is not one for one in given)]


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal, NaN to NaN."""
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())
