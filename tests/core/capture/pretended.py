"""CUDA graphs without CUDA: a replay runs what was captured once more, over CPU tensors, and leaves
the results where the capture left them.

A torch without CUDA has no graphs, streams, events or pinned memory, so that their names in
`torch.cuda` are replaced, and the two functions that record and replay. All that decides what is
captured, trusted, replayed, cut to size and handed out is the package's own.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

from sparse_bridge.core.capture import (
    captured_maps,
    captured_model,
    graph_capture,
    graph_key,
    graphed_module,
    padded,
    replay,
    replay_training,
)
from sparse_bridge.core.capture.captured_model import Captured
from sparse_bridge.core.capture.replay_trial import leaves_of
from sparse_bridge.core.closed_world import origins
from sparse_bridge.core.device import self_check
from sparse_bridge.refusals import Why
from tests.checks import NothingComputed

from .pretended_streams import Streams, Watching


def tensors(made):
    """All tensors of what a capture made: maps, a model's output, or gradients."""
    found = []
    if isinstance(made, (list, tuple)):
        return [tensor for one in made for tensor in tensors(one)]
    if isinstance(made, dict):
        return tensors(list(made.values()))
    if isinstance(made, Captured):

        def sparse(y):
            found.append(made.tensors.features_of(y))
            if not made.tensors.on_rows_of(made.padded_x, y):
                found.append(made.tensors.coordinates_of(y))

        with NothingComputed():  # a graph would not repeat it
            made.spec.for_each(made.tensors, found.append, sparse)
        return found
    if isinstance(made, torch.Tensor):
        return [made]
    return [] if made is None else list(made.parts)


class Graph:
    """touch: told of every replay, which is at work in all of the pool."""

    def __init__(self, work, pool):
        self.work, self.pool, self.gradients, self.made = work, pool, torch.is_grad_enabled(), work()

    touch = None

    @torch.no_grad()
    def replay(self):
        if self.touch is not None:
            self.touch(id(self.pool), self.pool, True, "a replay")
        with torch.set_grad_enabled(self.gradients):
            again = self.work()
        for mine, theirs in zip(tensors(self.made), tensors(again), strict=True):
            mine.copy_(theirs)


def capture(work, pool, room=None):
    assert pool is not None
    graph = Graph(work, pool)
    return graph, graph.made


at_start = []  # what is entered when a model that is run in place of its graph comes to its sparse tensor


def capture_from(work, pool):
    return capture(lambda: work(list(at_start)), pool)


def rewound(model):
    """At the sparse tensor buffers have the values that they have now: what runs before it, no graph repeats."""
    values = [(buffer.data, buffer.clone()) for buffer in model.buffers()]

    @contextlib.contextmanager
    def entered():
        for buffer, value in values:
            buffer.copy_(value)
        yield

    return entered()


def run(self, features):
    """A step's forward pass, run once more for a backward pass of its own."""
    self.features.detach()[: features.shape[0]].copy_(features)
    with torch.enable_grad(), pytest.MonkeyPatch.context() as patch:
        # A graph ends before a trial puts statistics back, so that replays move them.
        patch.setattr(captured_model, "preserved_statistics", contextlib.nullcontext)
        at_start[:] = [rewound(self.captured.owner.model)]
        try:
            self.captured = self.forward.work()
        finally:
            at_start.clear()
    self.leaves = leaves_of(self.captured)


def other_norms(device, target, part):
    """A self-check that notices the one thing that differs on CPUs: torch's norm there follows
    another formula than on GPUs, and than kernels."""
    return "results have other bits than torch's" if part.endswith(" norms") else None


def replays_on_the_cpu(gpu):
    """Let models over CPU tensors be replayed, besides. Their norms are torch's, in trials too, and what emulates a GPU
    is as trusted as a driver."""
    origins.of_module.cache_clear()
    gpu.replaces(origins, _TRUSTED=origins._TRUSTED | {"amd_emulator", "tinygrad"})
    streams = graphs_on_the_cpu(gpu)
    gpu.replaces(self_check, problem=other_norms)
    gpu.replaces(replay, captured_from=capture_from)
    gpu.replaces(replay_training, captured_from=capture_from, captured=capture)
    gpu.replaces(graph_key, why_not_capturable=lambda features: None if padded.current() is None else Why.GRAPH_NESTED)
    gpu.replaces(replay_training.StepGraph, run=run)
    return streams


def graphs_on_the_cpu(gpu):
    """Let maps over CPU tensors be captured, as far as Python goes; the streams that are
    pretended."""
    streams = Streams()
    gpu.has(streams=streams, enter=contextlib.nullcontext, capturing=False, graph_pool=object, pinned=True)
    gpu.has(reserved_memory=0, allocated_memory=0, free_memory=(1 << 30, 1 << 36))
    own_generator = lambda _: contextlib.nullcontext()  # noqa: E731
    gpu.replaces(captured_maps, _own_generator=own_generator, captured=capture, Streams=lambda _: streams)
    gpu.replaces(graph_capture, Streams=lambda _: streams, captured=capture)
    return streams


@contextlib.contextmanager
def watched(streams, gpu):
    """Raise `Race` where streams are not ordered; maps of the core are ordered as on a GPU."""
    gpu.replaces(Graph, touch=staticmethod(streams.touch))
    gpu.has(ordered=streams)
    gpu.replaces(graphed_module, observer=lambda: None)  # but for the mode that watches here
    own = captured_model.compare
    # Beside it the norms of a step are torch's, which round otherwise; its trial compares within rounding as well.
    gpu.replaces(captured_model, compare=lambda *given: None if torch.is_grad_enabled() else own(*given))
    with Watching(streams):
        yield
