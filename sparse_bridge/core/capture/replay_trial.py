"""A model over a padded input, forward and backward, and whether it computes the same.

Batch norms divide by the rows that there are. Whatever else mixes rows shows: outputs, gradients
and running statistics are compared with those of the input alone.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ...hooks import ModelReference
from ...refusals import Refusal, Why
from ..conv.convolution import autocast_dtype
from ..geometry.boxes import Box
from ..maps.coordinate_map import CoordinateMap
from ..maps.rows import fill_behind
from .calls.autograd_nodes import autograd_nodes, only_own_functions
from .calls.counted_norms import counted_norms
from .calls.exact_operators import ExactOperators
from .calls.foreign import ForeignReads
from .calls.index_checks import IndexChecks
from .calls.input_proxies import Call
from .calls.output_spec import OutputSpec
from .calls.structures import Tensors
from .captured_model import Captured, for_each_output
from .comparison import ROUNDING, compare_within_rounding
from .graph_capture import copies_of, copy_each
from .model_graphs import ModelGraphs
from .padded import TRIAL_FILL, PaddedInput

# Of what layers compute of an input alone: gradients of the outputs that autograd went backward with, and the check of
# gradients and outputs that were computed otherwise, which raises Refusal.
Reference = tuple[list[torch.Tensor], Callable[[list[Any]], None]]


class PaddedModel(ModelReference):
    """The model over parameters that share memory with its own, but have no history.

    What autograd knows of the parameters themselves belongs to other streams.
    """

    def __init__(self, owner: ModelGraphs, call: Call, coords: torch.Tensor, box: Box) -> None:
        """owner: of the model's graphs.  call: of the kind that will come; coords: of its sparse tensor,
        as the core has them, in `box`."""
        model = owner.model
        super().__init__(model)
        self.owner, self.call = owner, call
        self.tensors: Tensors = call.tensors_of(call.x)
        self.root = CoordinateMap(coords, box)
        features = self.tensors.features_of(call.x)
        assert features is not None
        self.features: torch.Tensor = features
        self.aliases = {
            name: parameter.detach().requires_grad_(parameter.requires_grad)
            for name, parameter in model.named_parameters()
        }
        self.trained = {name: p for name, p in self.aliases.items() if p.requires_grad}
        self.slots = _slots(model)
        self.gradient_mask: list[list[bool]] = []
        self.fill: float | None = 0.0  # what replays leave behind the last row of layers' results
        # Not the model's own: their versions are of interest to backward passes still to come.
        self.buffers = {name: buffer.data for name, buffer in model.named_buffers()}

    def inputs(self, features: torch.Tensor) -> list[torch.Tensor]:
        """The tensors whose gradients are computed."""
        return ([features] if features.requires_grad else []) + list(self.trained.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        values = {**self.aliases, **self.buffers}
        own_tensors = {slot: values[name] for slot, name in self.slots.items()}
        tensors = dict(own_tensors)
        # torch's own way to find shared ones leaves a module that is registered twice changed.
        out = torch.func.functional_call(self.model, tensors, args, kwargs, tie_weights=False)
        for name, tensor in own_tensors.items():  # torch leaves in `tensors` what replaced them
            if tensors[name] is not tensor:
                raise Refusal(Why.GRAPH_OTHER_PARAMETER, name)
        return out

    def over(self, padded_input: PaddedInput, features: torch.Tensor, contexts: Sequence[Any] = ()) -> Captured:
        """The model over a padded input. features: its own, [capacity, C].  contexts: to run it in."""
        with counted_norms(self.model, self.tensors):
            return Captured(self.owner, self, self.call, padded_input, features, self.root.box, contexts)

    def run_alone(self, noise: float = 0.0) -> tuple[list[torch.Tensor], torch.Tensor]:
        """(leaves of the model's output for the input without padding, its features). noise: the
        relative change of the features before."""
        features = self.features.detach().clone()
        if noise:
            features *= 1 + noise * torch.randn_like(features)
        features.requires_grad_(self.features.requires_grad)
        root = CoordinateMap(self.root.coords, self.root.box)

        def start() -> Any:
            self.rewind()
            return self.tensors.over(self.call.x, features, root)

        spec = OutputSpec.of(self.call, self, start, self.owner.reads)
        return output_leaves(self.tensors, spec), features

    def padded_features(self, padded_input: PaddedInput) -> torch.Tensor:
        """Features for the padded input, with those of x in place."""
        rows, channels = self.features.shape
        features = self.features.new_empty((padded_input.coords.shape[0], channels))
        features[:rows] = self.features.detach()
        fill_behind(features, rows, TRIAL_FILL)
        return features.detach().requires_grad_(self.features.requires_grad)

    def verify(self, padded_input: PaddedInput, rows: dict[int, int], out: Any) -> Captured:
        """The model over the padded input. out: what the layers returned for the call. Raises Refusal unless outputs,
        gradients and buffers are those, and where the model computes with other tensors than its own, or draws random
        numbers."""
        own = self.buffers
        try:
            features = self.padded_features(padded_input)
            self._begin()
            self.fill, padded_input.padding_value = None, math.nan
            weights = [*self.aliases.values(), *self.buffers.values()]
            known = [features, *padded_input.tensors(), *weights]
            reads = ForeignReads(known, self.owner.numbers, self.aliases)
            captured = self.over(padded_input, features, [self._rewound(), reads])
            if self.owner.memory is not None and reads.multiplies:
                self.owner.memory.multiplies = True
            if reads.random is not None:
                raise Refusal(Why.GRAPH_SIDE_EFFECT, reads.random, "random numbers")
            reference = self.reference(captured.spec.of_call(self.call, out, self.tensors))
            try:
                self._compare_padded(reference, captured, features, rows)
            except Refusal:  # its own sums over rows want zeros
                self.fill = 0.0
            del captured  # before the next one wants memory
            self._begin()
            padded_input.padding_value = TRIAL_FILL
            checks = IndexChecks(padded_input.capacities, weights)
            captured = self.over(padded_input, features, [self._rewound(), checks])
            self._compare_padded(reference, captured, features, rows)
            padded_input.refuse_mixed()
            return captured
        finally:
            self.buffers = own

    def exactly(self, padded_input: PaddedInput) -> Captured | None:
        """The model over the padded input with `ExactOperators`; None where there are none of those."""
        own, exact = self.buffers, ExactOperators()
        try:
            self._begin()
            padded_input.padding_value = TRIAL_FILL
            captured = self.over(padded_input, self.padded_features(padded_input), [self._rewound(), exact])
        finally:
            self.buffers = own
        return captured if exact.used else None

    def _compare_padded(
        self, reference: Reference, captured: Captured, features: torch.Tensor, rows: dict[int, int]
    ) -> None:
        """Raise Refusal unless the model over a padded input has computed the same."""
        cotangents, check = reference
        wide = leaves_of(captured)
        if len(wide) != len(cotangents):
            raise Refusal(Why.GRAPH_RETURNS_LESS)
        # A program may go backward through one after the other, which by a graph takes `retain_graph`.
        if any(not one & other for one, other in itertools.combinations(map(autograd_nodes, wide), 2)):
            raise Refusal(Why.GRAPH_SEPARATE)
        pairs = zip(cotangents, wide, strict=True)
        actual = gradients_of(wide, self.inputs(features), [_widened(*pair) for pair in pairs])
        check([*actual, *(leaf[: captured.padded_input.used(leaf, rows)] for leaf in wide)])

    def reference(self, eager: OutputSpec) -> Reference:
        """What the layers compute of x alone, forward and backward by random gradients of its outputs. eager: what
        they returned for the call, through which the program has not gone backward yet.

        Where the features have a history, or the model has functions with a backward pass of their own, which may
        allow one alone, the layers compute once more.
        """
        own, leaves = self.buffers, output_leaves(self.tensors, eager)
        inputs: list[torch.Tensor] = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        again = self.features.requires_grad or not only_own_functions(leaves)
        if again:
            self._begin()
            leaves, features = self.run_alone()
            inputs = self.inputs(features)
        cotangents = [torch.randn_like(leaf) * 0.1 for leaf in leaves]
        self.gradient_mask = _gradient_mask(leaves, inputs, cotangents)
        before = _random_states(self.features.device)
        expected = gradients_of(leaves, inputs, cotangents, retain_graph=not again)
        if not all(map(torch.equal, before, _random_states(self.features.device))):
            raise Refusal(Why.GRAPH_SIDE_EFFECT, "a backward pass", "random numbers")
        if not again:
            self.buffers = {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}
        expected += [leaf.detach() for leaf in (*leaves, *self._statistics().values())]
        numbers = self._numbers()
        self.buffers = own

        def check(actual: list[Any]) -> None:
            actual = [*actual, *self._statistics().values()]
            if self.features.requires_grad and actual[0] is not None:
                actual[0] = actual[0][: self.features.shape[0]]
            for name, buffer in self._numbers().items():
                if not torch.equal(buffer, numbers[name]):
                    raise Refusal(Why.GRAPH_BUFFER, name)
            noisy = functools.partial(self._noisy, cotangents)
            compare_within_rounding(self._names(len(cotangents)), actual, expected, noisy, self._precision())

        return cotangents, check

    def _noisy(self, cotangents: list[torch.Tensor]) -> list[Any]:
        """The same after a change of the features as small as rounding."""
        own = self.buffers
        self._begin()
        leaves, features = self.run_alone(noise=ROUNDING.get(self._precision(), 1e-6))
        computed = gradients_of(leaves, self.inputs(features), cotangents)
        computed += [*leaves, *self._statistics().values()]
        self.buffers = own
        return computed

    def _begin(self) -> None:
        """Go on from the buffers' values before the call."""
        self.buffers = dict(zip(self.call.buffers, copies_of([*self.call.buffers.values()]), strict=True))

    def rewind(self) -> None:
        """Go on from those values, whatever ran before the model came to its sparse tensor: no graph repeats it."""
        copy_each([*self.buffers.values()], [*self.call.buffers.values()])

    @contextlib.contextmanager
    def _rewound(self) -> Iterator[None]:
        self.rewind()
        yield

    def _names(self, outputs: int) -> list[str]:
        inputs = ["the features"] if self.features.requires_grad else []
        inputs += self.trained
        return (
            [f"the gradient of {name}" for name in inputs]
            + [f"output {number}" for number in range(outputs)]
            + list(self._statistics())
        )

    def _precision(self) -> torch.dtype:
        """What rounding to expect."""
        own: torch.dtype = self.features.dtype
        return autocast_dtype(self.features.device) or own

    def _statistics(self) -> dict[str, torch.Tensor]:
        """The buffers that know rounding."""
        return {name: buffer for name, buffer in self.buffers.items() if buffer.is_floating_point()}

    def _numbers(self) -> dict[str, torch.Tensor]:
        """The other buffers."""
        return {name: buffer for name, buffer in self.buffers.items() if not buffer.is_floating_point()}


def leaves_of(captured: Captured) -> list[torch.Tensor]:
    """The tensors of an output through which gradients come, each once."""
    return output_leaves(captured.tensors, captured.spec)


def output_leaves(tensors: Tensors, spec: OutputSpec) -> list[torch.Tensor]:
    """The tensors of an output through which gradients come, each once. Raises Refusal where there are none."""
    leaves: dict[int, torch.Tensor] = {}

    def look(tensor: torch.Tensor) -> None:
        if tensor.requires_grad:
            leaves[id(tensor)] = tensor

    for_each_output(tensors, spec, look)
    if not leaves:
        raise Refusal(Why.GRAPH_NO_GRADIENT)
    return list(leaves.values())


def gradients_of(
    leaves: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor],
    retain_graph: bool = False,
) -> list[Any]:
    """Gradients of `inputs` by the leaves' `cotangents`, of equal shapes; None for those that no leaf depends on.
    retain_graph: another backward pass is still to come."""
    return list(torch.autograd.grad(leaves, inputs, cotangents, retain_graph, allow_unused=True))


def _slots(model: nn.Module) -> dict[str, str]:
    """By every name under which a module of the model holds a parameter or buffer, the one under
    which `named_parameters` and `named_buffers` list it."""
    listed = [*model.named_parameters(), *model.named_buffers()]
    names = {id(tensor): name for name, tensor in listed}
    return {
        f"{path}.{name}" if path else name: names[id(tensor)]
        for path, module in model.named_modules()
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    }


def _gradient_mask(
    leaves: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]
) -> list[list[bool]]:
    """By leaf, the inputs that have a gradient through it; [] where there is but one leaf."""
    mask = []
    for leaf, cotangent in zip(leaves, cotangents, strict=True) if len(leaves) > 1 else ():
        through = torch.autograd.grad(leaf, inputs, cotangent, retain_graph=True, allow_unused=True)
        mask.append([gradient is not None for gradient in through])
    return mask


def _random_states(device: torch.device) -> list[torch.Tensor]:
    """Of the generators that an operator on this device may draw from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _widened(rows: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """`rows`, and zeros behind them as `wide` has rows."""
    return torch.cat([rows, rows.new_zeros((len(wide) - len(rows), *rows.shape[1:]))])
