"""Operators of torch that take rows by their numbers, or put several together: another scene may have fewer rows, or
more, or an odd number of them, and a comparison of rows that do not exist need not show in the trial's values."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Callable, Collection, Mapping
from types import FrameType
from typing import Any

import torch

from ....refusals import Refusal, Why

_Given = Mapping[str, Any]
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_OWN = os.path.join(pathlib.Path(__file__).parents[3], "")
_HANDS_ON = ("__torch_function__", "__torch_dispatch__")


def assert_all_rows(name: str, own: torch.Tensor, given: _Given, capacities: Collection[int]) -> None:
    """Raise Refusal where the program has an operator take a part of a level's rows.

    name, own, given: of the operator, its tensor, and all arguments.  capacities: rows of the levels in a trial; the
    first axis of a tensor that is so long is taken for that of rows."""
    takes_part = _TAKE_PART.get(name)
    if takes_part is None:
        return
    axis = next((axis for axis, size in enumerate(own.shape) if size in capacities), None)
    if axis is not None and takes_part(given, axis, own.shape[axis]) and not _is_ours(sys._getframe(1)):
        raise Refusal(Why.GRAPH_SLICE, name)


def _is_ours(frame: FrameType | None) -> bool:
    """Whether it is this package that calls torch, as its layers do, and not the program, whose calls modes and
    subclasses of this package hand on."""
    outermost = ""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_OWN):
            outermost = code.co_name
        elif not code.co_filename.startswith(_TORCH):
            break
        frame = frame.f_back
    return outermost not in _HANDS_ON


def _answers_for_all(given: _Given, axis: int, rows: int) -> bool:
    dim = given.get("dim")
    dims = [dim] if isinstance(dim, int) else dim
    return not dims or axis in {one % given["self"].ndim for one in dims}


def _counts(given: _Given, axis: int, rows: int) -> bool:
    return given["self"].dtype == torch.bool and _answers_for_all(given, axis, rows)


def _along(given: _Given, axis: int) -> bool:
    own, dim = given["self"], given.get("dim", given.get("dimension"))
    return (0 if dim is None else dim % own.ndim) == axis


def _slices(given: _Given, axis: int, rows: int) -> bool:
    start, end, step = given.get("start"), given.get("end", given.get("length")), given.get("step")
    whole = start in (None, 0) and end in (None, rows, sys.maxsize) and step in (None, 1)
    return _along(given, axis) and not whole


def _splits(given: _Given, axis: int, rows: int) -> bool:
    size = given.get("split_size", given.get("split_sizes"))
    return _along(given, axis) and size not in (rows, [rows])


def _groups(given: _Given, axis: int, rows: int) -> bool:
    """[N, C] as [N / 2, 2 * C]. Where an axis is N times something, each row stays apart from the others."""
    size = given.get("size")
    inferred = size is not None and -1 in size
    known = [one for one in size or () if one != -1]
    if inferred:
        rest = given["self"].numel() // max(1, torch.Size(known).numel())
        known.append(rest)
    return size is not None and not any(one and one % rows == 0 for one in known)


_TAKE_PART: dict[str, Callable[[_Given, int, int], bool]] = {
    **dict.fromkeys(("aten::slice", "aten::narrow_copy"), _slices),
    **dict.fromkeys(("aten::select", "aten::unbind", "aten::unfold"), lambda given, axis, _: _along(given, axis)),
    **dict.fromkeys(("aten::split", "aten::split_with_sizes", "aten::unsafe_split"), _splits),
    **dict.fromkeys(("aten::any", "aten::all", "aten::count_nonzero"), _answers_for_all),
    **dict.fromkeys([f"aten::{name}" for name in ("sum", "prod", "max", "min", "amax", "amin")], _counts),
    **dict.fromkeys(("aten::view", "aten::_unsafe_view", "aten::_reshape_alias", "aten::as_strided"), _groups),
}
