"""`torch.compile(model, backend="sparse_bridge")`: whole models as programs of launches.

Dynamo's guards say whether a program fits a call. Sizes are symbols, so one program serves scenes
of all sizes, without padding, capture or memory of its own; see `lowering`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from .... import settings, state
from .. import fusion
from ..writes import has_effects, may_write
from . import many_tensors, norm_pass
from .lowering import lower

Program = Callable[..., Any]
n_programs = 0  # graphs that became programs


@state.owns
def reset() -> None:
    """Count anew."""
    global n_programs
    n_programs = 0


def compiled(graph: GraphModule, inputs: Sequence[Any]) -> Program:
    """What runs a graph that `torch.compile` made.

    Without gradients norms, sums and activations become part of convolutions; with them, torch
    takes the graph apart into a forward and a backward pass, and each becomes a program.
    """
    global n_programs
    n_programs += 1
    learns = torch.is_grad_enabled() and any(map(_learns, graph.graph.nodes))
    if learns and settings.get().optimize != "off":
        norm_pass.take(graph.graph)
    elif settings.get().optimize != "off":
        fusion.fuse(graph.graph)
    if learns or any(may_write(node) or has_effects(node) for node in graph.graph.nodes):
        return _without_writes(graph, inputs)
    lower(graph.graph)
    graph.recompile()
    return graph.forward


def _learns(node: Any) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.requires_grad


def _without_writes(graph: GraphModule, inputs: Sequence[Any]) -> Program:
    """By torch's own operators, forward and backward, where results take the place of writes, and
    which say themselves that they draw random numbers."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import default_partition

    graph.recompile()
    program: Program = aot_autograd(
        fw_compiler=_one_pass,
        bw_compiler=_one_pass,
        inference_compiler=_one_pass,
        partition_fn=default_partition,
        keep_inference_input_mutations=True,
    )(graph, inputs)
    return program


def _one_pass(graph: GraphModule, inputs: Sequence[Any]) -> Program:
    """A graph of torch's own operators, which writes to nothing but what is an input."""
    from torch._functorch._aot_autograd.utils import make_boxed_func

    many_tensors.join(graph.graph)
    lower(graph.graph)
    graph.recompile()
    program: Program = make_boxed_func(graph.forward)
    return program
