"""Whether tensors that a graph or a trial computed are those of the layers: in all bits, or within rounding."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ... import tolerances
from ...refusals import Refusal, Why

ROUNDING = {torch.float16: 5e-4, torch.bfloat16: 4e-3}  # of a value, by dtype; 1e-6 of others


def compare(name: str, expected: torch.Tensor, actual: torch.Tensor) -> None:
    """Raise Refusal unless a tensor that a model makes of an input, `expected`, and the one of the
    same input with NaN behind its last row have the same bits; undecided where NaN that is there
    anyway would hide one from behind the last row."""
    own = f"{name}, {_described(expected)},"
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        raise Refusal(Why.GRAPH_OUTPUT_SHAPE, own, _described(actual))
    if torch.equal(expected, actual):  # and so without NaN
        return
    differ = expected != actual
    if not expected.is_floating_point():
        if differ.any():
            raise Refusal(Why.GRAPH_OUTPUT_ROWS, own, _rows(differ))
        return
    if expected.isnan().any():
        most = torch.finfo(expected.dtype).max
        raise Refusal(Why.GRAPH_NAN, own, _rows(expected.isnan()), expected.dtype, most)
    if actual.isnan().any():
        raise Refusal(Why.GRAPH_MIXED_ROWS, own, _rows(actual.isnan()))
    if differ.any():
        expected = expected.detach()
        size = torch.where(expected.isfinite(), expected, 0.0).double().norm()
        error = torch.where(differ, expected.double() - actual.double(), 0.0).norm()
        raise Refusal(Why.GRAPH_OTHER_BITS, own, float(error / size), _rows(differ))


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _rows(marked: torch.Tensor) -> int:
    """Rows with a mark."""
    return int(marked.reshape(len(marked), -1).any(1).sum())


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
    results = [_wide(result) for _, result, _ in present]
    references = [_wide(reference) for _, _, reference in present]
    errors = _norms(list(torch._foreach_sub(results, references))) if present else []
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


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """The same in a dtype in which differences are rounded by less."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def _norms(tensors: list[torch.Tensor]) -> list[float]:
    """Of each tensor, in one read-back."""
    if not tensors:
        return []
    norms = torch._foreach_norm(tensors, 2, dtype=torch.float64)
    values: list[float] = torch.stack([norm.to(norms[0].device) for norm in norms]).tolist()
    return values
