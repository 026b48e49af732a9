"""What a call returned, and what it wrote into dictionaries among its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ....refusals import Refusal, Why, never_caught
from .input_proxies import AMBIGUOUS, Call, InputProxies
from .structures import MISSING, Lookup, Tensors, map_structure


class OutputSpec(NamedTuple):
    """What a call returned, and what it wrote into dictionaries among its inputs.

    proxies: values in there that stand for inputs of the call, by identity, with their paths.  x:
    the sparse tensor that it took.  numbers: whether there are any outside of tensors.
    """

    value: Any
    written: dict[Any, dict[Any, Any]]
    proxies: dict[int, tuple[Any, Any]]
    x: Any
    numbers: bool = False

    @staticmethod
    def of(call: Call, function: Callable[..., Any], start: Callable[[], Any], reads: set[Any]) -> OutputSpec:
        """The call of `function` with another sparse tensor, that `start` makes."""
        inputs = InputProxies(reads, start, call.tensors_of)
        with never_caught():
            value = call.rerun(function, inputs)
        spec = OutputSpec(value, inputs.written(), inputs.proxies, inputs.x)
        inputs.end()
        return spec

    def passthrough(self, value: Any) -> Any:
        """`value` where it stands for an input of the call, else MISSING."""
        registered = self.proxies.get(id(value))
        return value if value is self.x or (registered and registered[0] is value) else MISSING

    def input_lookup(self, call: Call) -> Lookup:
        """The function that finds the input of `call` which a value stands for, else MISSING."""

        def lookup(value: Any) -> Any:
            if self.passthrough(value) is MISSING:
                return MISSING
            path = () if value is self.x else self.proxies[id(value)][1]
            if path is AMBIGUOUS:
                raise Refusal(Why.GRAPH_RETURNS_SHARED)
            return call.input_at(path)

        return lookup

    def values(self) -> list[Any]:
        """What was returned, then what was written, in the order of the dictionaries."""
        return [self.value, *(entry for new in self.written.values() for entry in new.values())]

    def of_call(self, call: Call, value: Any, tensors: Tensors) -> OutputSpec:
        """The same of the call itself, which returned `value`."""
        written = {path: {key: call.dicts[path][key] for key in new} for path, new in self.written.items()}
        inputs = {key: (own, AMBIGUOUS) for key, own in call.inputs_by_id(tensors).items()}
        return OutputSpec(value, written, inputs, call.x)

    def write_back(self, call: Call, convert: Callable[[Any], Any]) -> Any:
        """What the call returns: the values of this output, each through `convert`. Those that were
        written into dictionaries are written into those of the call."""
        new = {path: {key: convert(entry) for key, entry in entries.items()} for path, entries in self.written.items()}
        result = convert(self.value)
        for path, entries in new.items():
            call.dicts[path].update(entries)
        return result

    def for_each(self, tensors: Tensors, look: Callable[[torch.Tensor], Any], inside: Callable[[Any], Any]) -> None:
        """Show all tensors to `look` and all sparse ones to `inside`, but for inputs of the call."""

        def seen(tensor: Any) -> Any:
            look(tensor)
            return tensor

        def on_sparse(y: Any) -> Any:
            inside(y)
            return y

        for value in self.values():
            map_structure(tensors, value, seen, on_sparse, self.passthrough)
