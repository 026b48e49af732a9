"""What a model may change while it is recorded: constants that it has made itself, before a step reads them. A package
plays the same at every run, and would compute something else than the model where that changes more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..plugin_checks import ExportError
from .recorder import Recorder

_Kept = dict[str, torch.Tensor]


def changed_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[torch.Tensor, bool]]:
    """(a tensor that an operation of torch writes, whether it is its `out`)."""
    for place, one in enumerate(func._schema.arguments):
        if one.alias_info is not None and one.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(one.name)
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, torch.Tensor):
                    yield leaf, one.is_out


def require_own(it: Recorder, changed: torch.Tensor) -> None:
    """Raises ExportError unless a constant may be changed in place."""
    if not it.may_change(changed):
        raise ExportError(
            f"{it.where()} changes a tensor {list(changed.shape)} in place that is a weight, a buffer or was read "
            "before; a package plays the same at every run. Make a new tensor instead."
        )


def notice_aliases(it: Recorder, func: Any, kwargs: Mapping[str, Any], x: torch.Tensor, result: Any) -> None:
    """Learn that torch copies where a view of a grid with channels last does, or the other way round: by `contiguous`
    and `reshape`, which look at strides."""
    if x.is_contiguous() or _base(x) not in it.channels_last or not isinstance(result, torch.Tensor):
        return
    copied = func.overloadpacket is torch.ops.aten.clone and kwargs.get("memory_format") is torch.contiguous_format
    if copied or (func.is_view and result.is_contiguous()):
        it.ambiguous |= {_base(x), _base(result)}


def require_clear(it: Recorder, changed: torch.Tensor) -> None:
    """Raises ExportError for a change in place that other tensors see here and not in torch, or the other way round."""
    if _base(changed) in it.ambiguous:
        raise ExportError(
            f"{it.where()} changes a tensor {list(changed.shape)} in place that a convolution over a grid has made, "
            "and that was permuted, flattened or made contiguous: whether others share its memory depends on strides. "
            "Make a new tensor instead."
        )


def _base(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def kept_by(model: nn.Module) -> _Kept:
    """Tensors that modules keep from one call to the next, by their names."""
    found: _Kept = {}
    for name, module in model.named_modules():
        for own in (vars(module), module._parameters, module._buffers):
            for key, value in own.items():
                if isinstance(value, torch.Tensor):
                    found[f"{name}.{key}".lstrip(".")] = value
    return found


def require_kept(it: Recorder, model: nn.Module, before: _Kept) -> None:
    """Raises ExportError where a call has put other values in the place of a tensor that it has read. before: what
    modules kept until then."""
    for name, value in kept_by(model).items():
        old = before.get(name)
        if old is None or old is value or not it.was_read(old):
            continue
        if it.is_written(value) or value.shape != old.shape or not torch.equal(value, old):
            raise ExportError(
                f"the model reads {name!r}, which its last call has left there, and leaves another one; a package "
                "plays the same at every run. Make it an input and a result of the program around it."
            )
