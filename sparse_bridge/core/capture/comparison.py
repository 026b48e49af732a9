"""Replays beside the layers: whether a graph computes what they do, now and then for as long as it serves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from ... import policy, settings, tolerances
from ...refusals import Refusal, Verdict, Why
from .calls.call_kind import CallKind
from .calls.input_proxies import Call
from .captured_model import ROWS, preserved_statistics
from .graph_capture import trial
from .graph_key import Root


class Owner(Protocol):
    """Who has the graphs, see `graphed_module.GraphedModule`."""

    model: nn.Module
    attempts: policy.Attempts
    by_box: bool

    def executed_values(self, graph: Any, call: Call, root: Root) -> list[Any] | None:
        """The values of the output by a graph; None where it cannot serve the call."""

    def compare_gradients(self, graph: Any, call: Call, root: Root) -> None:
        """Raise Refusal where gradients by the graph are not those of the layers."""

    def drop(self, reason: str) -> None:
        """Replay no more."""

    def refuse(self, reason: str) -> None:
        """Remember why this was not replayed."""

    def forget_graphs(self) -> None:
        """Begin anew with kinds of calls."""


def comparison_due(graph: Any) -> bool:
    """Whether the layers compute a call as well that this graph serves."""
    every = settings.get().compare_every
    return every > 0 and (graph.compared.due() or graph.compared.occasions % every == 0)


def compare(owner: Owner, kind: CallKind, graph: Any, call: Call, root: Root, out: Any) -> None:
    """Replay a call for which the layers have returned `out`, by a graph of its kind. Where both agree bit for bit
    (gradients: within rounding), graphs of the kind are trusted in the columns of the box in which this input
    differs; else they are dropped."""
    columns = graph.captured.differing_columns(root)
    with trial(), torch.no_grad(), preserved_statistics(owner.model):
        try:
            values = owner.executed_values(graph, call, root)
            if values is None:
                return
            graph.captured.compare(call, out, values)
            owner.compare_gradients(graph, call, root)
            kind.verified |= columns
        except Refusal as error:
            _differs(owner, kind, columns, error)


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


def compare_within_rounding(
    names: list[str], actual: list[Any], expected: list[Any], noisy: Callable[[], list[Any]], dtype: torch.dtype
) -> None:
    """Raise Refusal unless these tensors agree within rounding.

    noisy: computes the expected ones after a change of the features as small as rounding, which shows how much
    rounding moves each tensor; asked where tolerances alone do not do. Gradients that are but rounding, as
    of a bias before a norm, are measured by the others.
    """
    loose, tight = (tolerances.of(quantity, dtype).rms for quantity in ("gradients", "step"))
    present: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    for index, (name, result, reference) in enumerate(zip(names, actual, expected, strict=True)):
        if (result is None) != (reference is None) or (result is not None and result.shape != reference.shape):
            raise Refusal(Why.GRAPH_GRADIENT_SHAPE, name)
        if reference is not None and reference.numel():
            present.append((index, result.detach(), reference.detach()))
    sizes = _norms([reference for _, _, reference in present])
    numbers = [reference.numel() for _, _, reference in present]
    scale = math.sqrt(sum(size * size for size in sizes) / max(1, sum(numbers)))
    if not math.isfinite(scale):
        raise Refusal(Why.GRAPH_INFINITE)
    errors = _norms([result.double() - reference.double() for _, result, reference in present])
    moved: list[Any] = []
    for (index, _, reference), size, number, error in zip(present, sizes, numbers, errors, strict=True):
        tolerance = tight if names[index].startswith("output") else loose  # no sums over rows
        allowed = tolerance * (size + scale * math.sqrt(number))
        if error <= allowed:
            continue
        moved = moved or noisy()
        allowed += 3 * _norms([moved[index].detach().double() - reference.double()])[0]
        if not error <= allowed:
            raise Refusal(Why.GRAPH_MIXED_GRADIENTS, names[index], error, allowed)


def _norms(tensors: list[torch.Tensor]) -> list[float]:
    """Of each tensor, in one read-back."""
    if not tensors:
        return []
    norms = [tensor.double().norm() for tensor in tensors]
    values: list[float] = torch.stack([norm.to(norms[0].device) for norm in norms]).tolist()
    return values
