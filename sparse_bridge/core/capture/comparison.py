"""Replays beside the layers: whether a graph computes what they do, now and then for as long as it serves."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from ... import policy
from ...refusals import Refusal, Verdict, Why
from .calls.call import Call
from .calls.call_kind import CallKind
from .captured_model import ROWS, preserved_statistics
from .graph_capture import empty_cache, trial
from .graph_key import Root


class Owner(Protocol):
    """Who has the graphs, see `graphed_module.GraphedModule`."""

    model: nn.Module
    attempts: policy.Attempts
    by_box: bool

    def values(self, graph: Any, call: Call, root: Root) -> list[Any] | None:
        """The values of the output by a graph; None where it cannot serve the call."""

    def compare_gradients(self, kind: CallKind, call: Call, root: Root) -> None:
        """Raise Refusal where gradients by the graph are not those of the layers."""

    def drop(self, reason: str) -> None:
        """Replay no more."""

    def refuse(self, reason: str) -> None:
        """Remember why this was not replayed."""

    def forget_graphs(self) -> None:
        """Begin anew with kinds of calls."""


def compare(owner: Owner, kind: CallKind, call: Call, root: Root, out: Any) -> None:
    """Replay a call for which the layers have returned `out`. Where both agree bit for bit (gradients: within
    rounding), the graph is trusted in the columns of the box in which this input differs; else it is dropped."""
    graph = kind.graph
    columns = graph.captured.differing_columns(root)
    with trial(), torch.no_grad(), preserved_statistics(owner.model):
        try:
            values = owner.values(graph, call, root)
            if values is None:
                return
            graph.captured.compare(call, out, values)
            owner.compare_gradients(kind, call, root)
            kind.verified |= columns
        except Refusal as error:
            _differs(owner, kind, columns, error)
        finally:
            empty_cache()  # the layers took what replays do not need


def _differs(owner: Owner, kind: CallKind, columns: set[int], error: Refusal) -> None:
    if error.verdict is Verdict.UNDECIDED:
        return
    if error.verdict is Verdict.FINAL:
        raise error
    if columns <= kind.verified:
        owner.drop(Why.GRAPH_DIFFERS.says(error))
        return
    if columns == {ROWS}:
        owner.attempts.failed()
        owner.refuse(str(error))
    owner.by_box = owner.by_box or columns != {ROWS}
    owner.forget_graphs()
