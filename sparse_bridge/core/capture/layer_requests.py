"""The kernel maps that a model asks for of its own input, whatever has been asked of that before."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from ...errors import SparseBridgeError
from ...refusals import Refusal, Why
from ..closed_world.kept import assert_no_mutation
from ..conv.deferred import materialize
from ..geometry.data_bounds import Root
from ..maps.coordinate_map import CoordinateMap
from ..prefetch import prefetch
from ..prefetch.recording import Recording
from .calls.input_proxies import Call, TrackedDict
from .calls.output_spec import OutputSpec
from .captured_maps import own_random_numbers
from .graph_capture import preserved_statistics
from .graph_key import GraphKey
from .model_graphs import ModelGraphs


def requests_of_layers(owner: ModelGraphs, key: GraphKey, call: Call, root: Root) -> Recording | None:
    """The requests of a call's layers, which compute once more, over copies of what they are given and without its
    maps; None where there are none.

    Raises Refusal where they make a level that `root` has already: they would have taken that one."""
    tensors, gradients = key.tensors, torch.is_grad_enabled()
    features = tensors.features_of(call.x)
    assert features is not None
    features = features.detach().clone().requires_grad_(features.requires_grad)
    start = functools.partial(tensors.over, call.x, features, CoordinateMap(root.coords.detach().clone(), root.box))
    unseen = assert_no_mutation(owner.model, tensors), preserved_statistics(owner.model), own_random_numbers(key.device)
    with torch.inference_mode(False), torch.set_grad_enabled(gradients), contextlib.ExitStack() as stack:
        for manager in unseen:
            stack.enter_context(manager)
        recording = stack.enter_context(prefetch.recorded())
        try:
            spec = OutputSpec.of(call, _over_copies(owner.run_layers), start, set())
            spec.for_each(tensors, materialize, tensors.features_of)
        except SparseBridgeError as error:
            if isinstance(error, Refusal) or tensors.is_fresh(call.x):
                raise
            raise Refusal(Why.GRAPH_HAS_MAPS) from None  # a layer looks for one of these levels
    if tensors.levels_of(spec.x) & root.known:
        raise Refusal(Why.GRAPH_HAS_MAPS)
    if not recording.steps:
        return None
    return recording.with_backward_views() if owner.trains else recording


def _over_copies(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which may write to the tensors that it is given without harm to the program's."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*map(_copied, args), **{name: _copied(value) for name, value in kwargs.items()})

    return call


def _copied(value: Any) -> Any:
    if type(value) is torch.Tensor:
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) is TrackedDict:  # a copy itself
        for key, entry in dict.items(value):
            value.old[key] = _copied(entry)
        dict.update(value, value.old)
        return value
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value
