"""A model over a padded input: what it made, and how that becomes the output of a call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ...kernels.runtime.uploads import uploads_refused
from ...refusals import Refusal, Why
from ..closed_world.grid_uses import BATCH_SIZE, GRID
from ..closed_world.guards import Guards
from ..conv.convolution import autocast_dtype
from ..conv.deferred import materialize
from ..geometry.boxes import Box
from ..geometry.data_bounds import Root
from ..maps.coordinate_map import CoordinateMap
from ..maps.map_cache import version_of
from ..maps.rows import Rows
from ..prefetch.recording import boxes_of
from . import padded
from .calls.foreign import ForeignReads
from .calls.input_proxies import Call
from .calls.output_spec import OutputSpec
from .calls.results import Results
from .calls.structures import (
    Lookup,
    StructureCheck,
    Tensors,
    has_numbers,
    map_structure,
    named,
    own_attributes,
    share_memory,
)
from .comparison import ROUNDING, compare, compare_within_rounding
from .graph_capture import preserved_statistics
from .model_graphs import ModelGraphs
from .padded import PaddedInput

ROWS, ITEMS = -1, -2  # in the place of a column: how many rows there are, and that every batch item has some


Cut = Callable[[torch.Tensor], torch.Tensor]


class Captured:
    """A model over a padded input: its output, whose tensors stay where they are.  rounded: it may be off by rounding,
    as operators of torch round by how many rows there are."""

    rounded = False

    def __init__(
        self,
        owner: ModelGraphs,
        forward: Callable[..., Any],
        call: Call,
        padded_input: PaddedInput,
        features: torch.Tensor,
        box: Box,
        contexts: Sequence[contextlib.AbstractContextManager[Any]] = (),
    ) -> None:
        """Run it.  owner: of the graph to be.  forward: the model's.  box: of the call's input.  contexts: what to
        enter when it begins with the sparse tensor.

        Raises Refusal where it does more to its input than to read it."""
        self.tensors: Tensors = call.tensors_of(call.x)
        self.owner, self.padded_input, self.features, self.box = owner, padded_input, features, box
        self.rows = self.tensors.coordinates_of(call.x).shape[0]
        known, versions, requires_grad = set[str](), [version_of(features)], features.requires_grad
        with preserved_statistics(owner.model), contextlib.ExitStack() as stack:
            modes: list[Any] = []

            def start() -> Any:
                first = any(isinstance(one, ForeignReads) for one in contexts)
                numbers = owner.numbers.served(features.device, first)
                scope = padded.using(padded_input)
                for manager in (numbers, *contexts, scope, uploads_refused(), uncached_autocast()):
                    modes.append(stack.enter_context(manager))
                shape = padded_input.coords.shape[0]
                root = CoordinateMap(padded_input.coords, box, Rows(None, padded_input.count, shape))
                root.adopt()
                self.padded_x = self.tensors.over(call.x, features, root)
                self.coords = self.tensors.coordinates_of(self.padded_x)
                versions.append(version_of(self.coords))
                known.update(own_attributes(self.padded_x))
                return self.padded_x

            self.spec = self._launched(OutputSpec.of(call, forward, start, owner.reads))
            for mode in modes:
                if isinstance(mode, ForeignReads):
                    for_each_output(self.tensors, self.spec, mode.check)
        for_each_output(self.tensors, self.spec, _refuse_parameter)
        given = self.tensors.features_of(self.padded_x), self.tensors.coordinates_of(self.padded_x)
        if given[0] is not features or given[1] is not self.coords:
            raise Refusal(Why.GRAPH_WRITES_INPUT)
        if [version_of(features), version_of(self.coords)] != versions or features.requires_grad != requires_grad:
            raise Refusal(Why.GRAPH_WRITES_INPUT)
        if not own_attributes(self.padded_x) <= known:
            raise Refusal(Why.GRAPH_WRITES_INPUT)
        for name in own_attributes(call.x) - known:
            raise Refusal(Why.GRAPH_ATTRIBUTE, name, named(call.x), named(getattr(call.x, name)))

    def box_columns(self, root: Root, guards: Guards | None) -> frozenset[int]:
        """Columns of the input's box that what is computed may follow from. guards: of the model."""
        uses = GRID if guards is None else guards.grid_uses
        if not isinstance(root.bounds, Box):  # nobody has told the program a grid
            uses = frozenset()
        follows = bool(self.padded_input.grids or uses - {BATCH_SIZE})
        columns = frozenset(range(len(root.box.size)) if follows else {0} if uses else ())
        return columns | {0, ITEMS} if self.padded_input.pools else columns

    def differing_columns(self, root: Root) -> set[int]:
        """Columns of the box in which an input differs from the one of the capture; ROWS as well, where
        their number differs and numbers of the output may follow from it."""
        box, captured = root.box, self.box
        columns: set[int] = set()
        if box is not captured:
            pairs = zip(captured.lo, captured.size, box.lo, box.size, strict=True)
            columns = {n for n, (a, b, c, d) in enumerate(pairs) if (a, b) != (c, d)}
        if self.spec.numbers and len(root.coords) != self.rows:
            columns.add(ROWS)
        return columns

    def _launched(self, spec: OutputSpec) -> OutputSpec:
        """The same without deferred convolutions, and with coordinates computed: a
        framework may compute them when they are first read, which no graph would repeat."""

        def inside(y: Any) -> Any:
            self.tensors.features_of(y)
            if not self.tensors.on_rows_of(self.padded_x, y):
                self.tensors.coordinates_of(y)
            return y

        memo: dict[int, Any] = {}

        def launch(value: Any) -> Any:
            return map_structure(self.tensors, value, materialize, inside, spec.passthrough, memo)

        new = {path: {key: launch(entry) for key, entry in entries.items()} for path, entries in spec.written.items()}
        launched = spec._replace(value=launch(spec.value), written=new)
        numbers = [has_numbers(value, self.tensors.is_tensor) for value in launched.values()]
        return launched._replace(numbers=any(numbers))

    def cutter(self, call: Call, rows: dict[int, int]) -> Cut:
        """The function that copies the rows in use of a tensor; the coordinates and features of the
        call it returns as they are."""
        own, features = self.tensors.coordinates_of(call.x), self.tensors.features_of(call.x)

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            if tensor is self.features and features is not None:
                return features
            if tensor.data_ptr() == self.coords.data_ptr() and tensor.shape == self.coords.shape:
                return own
            return tensor[: self.padded_input.used(tensor, rows)].clone()

        return cut

    def of(self, call: Call, rows: dict[int, int], root: Root, convert: Cut | None = None) -> Callable[[Any], Any]:
        """The function that makes a value of the output one of `call`, over the coordinates `root`.
        convert: makes a tensor one of the call, if not by copying the rows in use."""
        # A tensor that is returned in two places, or is the coordinates of two results, is one in both.
        copy = self.cutter(call, rows)
        once, cut = functools.cache(convert or copy), functools.cache(copy)
        boxes: dict[int, Box] = {}
        if root.box is not self.box:
            boxes = boxes_of(root.box, self.padded_input.recording.steps)

        def on_sparse(y: Any) -> Any:
            wide = self.tensors.features_of(y)
            assert wide is not None
            box = boxes.get(self.padded_input.level_of(wide))
            same_rows = self.tensors.on_rows_of(self.padded_x, y)
            coords = None if same_rows else cut(self.tensors.coordinates_of(y))
            result = self.tensors.result(call.x, y, once(wide), coords, box)
            results.add(y, result)
            self.tensors.keep_for(result, y, results, cut)
            return result

        memo: dict[int, Any] = {}
        again = functools.partial(self._computed_again, call._replace(x=None, dicts={}, parts={}), root)
        results = Results(self.tensors, self.padded_x, call.x, again)
        lookup = self._input_lookup(call, results, cut)
        return lambda value: map_structure(self.tensors, value, once, on_sparse, lookup, memo)

    def _input_lookup(self, call: Call, results: Results, cut: Cut) -> Lookup:
        """The function that finds the input of the call which a value of the output stands for."""
        find = self.spec.input_lookup(call)

        def lookup(value: Any) -> Any:
            if value is self.padded_x:  # the model has maps of it now
                self.tensors.keep_for(call.x, value, results, cut)
            return find(value)

        return lookup

    def rounds_by_rows(
        self, call: Call, root: Root, rows: dict[int, int], out: Any, exactly: Callable[[], Captured | None]
    ) -> bool:
        """Raise Refusal unless this is what the model returned for the call, `out`; whether it is but for operators
        that round by how many rows there are.  exactly: makes the same with `ExactOperators`, or returns None."""
        try:
            self.compare_values(call, root, rows, out)
        except Refusal as error:
            exact = exactly() if error.why is Why.GRAPH_OTHER_BITS else None
            if exact is None:
                raise
        else:
            return False
        exact.compare_values(call, root, rows, out)
        self.rounded = True
        self.compare_values(call, root, rows, out)
        return True

    def compare_values(self, call: Call, root: Root, rows: dict[int, int], out: Any) -> None:
        """`compare` what it made of the input of the capture, of which there are these `rows`."""
        with torch.no_grad():
            values = list(map(self.of(call, rows, root), self.spec.values()))
        self.compare(call, root, out, values)

    def compare(self, call: Call, root: Root, out: Any, values: list[Any]) -> None:
        """Raise Refusal unless `values`, the values of the output as those of `call`, are what
        the model returned for it, `out`: in all bits, or within rounding where it is `rounded`."""
        self.assert_same_structure(call, out, values)
        eager = self.spec.of_call(call, out, self.tensors)
        expected = _outputs(self.tensors, eager.values(), eager.passthrough)
        actual = _outputs(self.tensors, values, eager.passthrough)
        padded_outputs = _outputs(self.tensors, self.spec.values(), self._own)
        if not len(expected) == len(actual) > 0:
            raise Refusal(Why.GRAPH_OUTPUT_COUNT, len(expected), len(actual))
        rounded: dict[int, tuple[str, torch.Tensor, torch.Tensor]] = {}
        for number, (reference, result, padded_output) in enumerate(zip(expected, actual, padded_outputs, strict=True)):
            level = self.padded_input.level_of(padded_output[0])
            name = f"output {number} ({'a grid' if level == padded.GRID else f'level {level}'})"
            if self.rounded and reference[0].is_floating_point():
                rounded[number] = name, result[0], reference[0]
            else:
                compare(name, reference[0], result[0])
            if reference[1] is not None and result[1] is not None:
                compare(f"coordinates of {name}", reference[1], result[1])
        if rounded:
            names, results, references = map(list, zip(*rounded.values(), strict=True))
            noisy = functools.partial(self._noisy, call, root, rounded.keys())
            compare_within_rounding(names, results, references, noisy, self.precision())

    def precision(self) -> torch.dtype:
        """What rounding to expect."""
        return autocast_dtype(self.features.device) or self.features.dtype

    def _noisy(self, call: Call, root: Root, numbers: Iterable[int]) -> list[torch.Tensor]:
        """Outputs of the layers after a change of the features as small as rounding."""
        features = self.tensors.features_of(call.x)
        assert features is not None
        generator = torch.Generator(features.device).manual_seed(0)
        noise = torch.randn(features.shape, generator=generator, device=features.device)
        factor = 1 + ROUNDING.get(self.precision(), 1e-6) * noise
        spec = self._layers_over(call, root, features.detach() * factor.to(features.dtype))
        outputs = _outputs(self.tensors, spec.values(), spec.passthrough)
        return [outputs[number][0] for number in numbers]

    def _own(self, value: Any) -> Any:
        """`value` where it is the call's own, else MISSING."""
        return value if value is self.features or value is self.coords else self.spec.passthrough(value)

    def assert_same_structure(self, call: Call, out: Any, values: list[Any]) -> None:
        """The same of all but the numbers in tensors. These share no memory, as copies do not: programs may write."""
        outputs = [one for one, _ in _outputs(self.tensors, self.spec.values(), self._own)]
        if share_memory([self.features, self.coords, *outputs]):
            raise Refusal(Why.GRAPH_OUTPUT_MEMORY)
        check = StructureCheck(call.inputs_by_id(self.tensors), self.tensors.is_tensor)
        for returned, computed in zip(self.spec.of_call(call, out, self.tensors).values(), values, strict=True):
            check("its output", returned, computed)

    def _computed_again(self, call: Call, root: Root, x: Any, y: Any) -> Any:
        """The sparse tensor of the call that is like `y`, with its kernel maps, some of which code outside of the model
        asks for: the model computes once more, and is not replayed from now on.  x: like the call's."""
        call = call._replace(x=x)
        self.owner.drop(Why.GRAPH_MAPS_OUTSIDE.says())
        own: list[Any] = []
        outputs: list[Any] = []
        features = self.tensors.features_of(call.x)
        assert features is not None
        spec = self._layers_over(call, root, features.detach())
        for one, kept in ((self.spec, own), (spec, outputs)):
            one.for_each(self.tensors, lambda _: None, kept.append)
        return next((output for like, output in zip(own, outputs, strict=True) if like is y), spec.x)

    def _layers_over(self, call: Call, root: Root, features: torch.Tensor) -> OutputSpec:
        """What the layers make of the call's coordinates with these features; nothing else is moved."""
        with torch.no_grad(), preserved_statistics(self.owner.model), torch.random.fork_rng():
            start = functools.partial(self.tensors.over, call.x, features, CoordinateMap(root.coords, root.box))
            return OutputSpec.of(call, self.owner.run_layers, start, set())


def _refuse_parameter(tensor: torch.Tensor) -> None:
    """Raise Refusal for an output of a class of its own, as a parameter: a replay returns tensors."""
    if type(tensor) is not torch.Tensor:
        raise Refusal(Why.GRAPH_RETURNS_OBJECT, named(tensor))


def for_each_output(tensors: Tensors, spec: OutputSpec, look: Callable[[torch.Tensor], None]) -> None:
    """Show all tensors of an output but coordinates of sparse tensors to `look`."""
    spec.for_each(tensors, look, lambda y: look(tensors.features_of(y)))  # type: ignore[arg-type]


def _outputs(tensors: Tensors, values: list[Any], lookup: Lookup) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """(tensor, None) or (features, coordinates) of all that values hold but for inputs of the
    call, which `lookup` finds."""
    outputs: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    memo: dict[int, Any] = {}

    def on_tensor(tensor: torch.Tensor) -> torch.Tensor:
        outputs.append((tensor, None))
        return tensor

    def on_sparse(y: Any) -> Any:
        outputs.append((tensors.features_of(y), tensors.coordinates_of(y)))  # type: ignore[arg-type]
        return y

    for value in values:
        map_structure(tensors, value, on_tensor, on_sparse, lookup, memo)
    return outputs


@contextlib.contextmanager
def uncached_autocast() -> Iterator[None]:
    """Without the casts of weights that autocast keeps and soon lets go of."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
