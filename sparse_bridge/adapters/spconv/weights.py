"""Checkpoints of older spconv versions, brought to the layout of spconv 2.2 and later."""

from __future__ import annotations

from typing import Any

import torch

from ... import log
from ...errors import ContractError
from .rules.switches import saved_layout

_VARIABLE = "SPCONV_SAVED_WEIGHT_LAYOUT"
_COUNTER = "max_num_voxels_during_training"
_ORIGIN = {"RSKC": "spconv 2.0 / 2.1 (algo Native)", "RSCK": "spconv 1.x"}


def before_loading(layer: Any, state_dict: dict[str, torch.Tensor], prefix: str, errors: list[str]) -> None:
    """What a convolution does to a checkpoint before its own entries are loaded.

    Adds the voxel counter to checkpoints that lack it. SPCONV_SAVED_WEIGHT_LAYOUT "RSKC" or "RSCK"
    converts the weight in place; where it is not set and the weight has the shape of an older
    layout, `errors`, which torch raises with its own of the shape, names that layout; unless a
    loader or hook of the program's own may convert it.

    Raises ContractError for an unknown layout, and where one is set and the checkpoint has no
    weight.
    """
    counter = prefix + _COUNTER
    if hasattr(layer, _COUNTER) and counter not in state_dict:
        state_dict[counter] = torch.zeros(1, dtype=torch.int32)
    layout, key = saved_layout(), prefix + "weight"
    if layout in _ORIGIN:
        convert_layout(state_dict, key, layout, layer)
        log.once(
            ("spconv-layout", layout),
            f"loading weights saved by {_ORIGIN[layout]}: layout {layout} is converted to KRSC",
        )
    elif not layout and isinstance(state_dict.get(key), torch.Tensor) and _torch_loads(layer):
        _hint(state_dict[key], key, layer, errors)


def _torch_loads(layer: Any) -> bool:
    """Whether nothing comes between this hook and torch, which refuses weights of another shape."""
    loads = getattr(layer._load_from_state_dict, "__func__", None)
    return loads is torch.nn.Module._load_from_state_dict and len(layer._load_state_dict_pre_hooks) == 1


def _shapes(layer: Any) -> dict[str, tuple[int, ...]]:
    kernel = tuple(layer.kernel_size)
    c_in, c_out = layer.in_channels // layer.groups, layer.out_channels
    return {"RSKC": (*kernel, c_out, c_in), "RSCK": (*kernel, c_in, c_out)}


def _hint(weight: torch.Tensor, key: str, layer: Any, errors: list[str]) -> None:
    shape = tuple(weight.shape)
    if shape == tuple(layer.weight_shape):
        return
    advice = ", ".join(
        f"{_VARIABLE}={layout} if it was saved by {_ORIGIN[layout]}"
        for layout, stored in _shapes(layer).items()
        if stored == shape
    )
    if advice and not any(advice in error for error in errors):  # once for all layers
        errors.append(
            f"{key} is stored as {list(shape)}, an older layout than the layer's {list(layer.weight_shape)}. Set "
            f"{advice}, before the program starts to load the checkpoint."
        )


def convert_layout(state_dict: dict[str, torch.Tensor], key: str, layout: str, layer: Any) -> None:
    """Permute `state_dict[key]` from `layout` ("RSKC" or "RSCK") to KRSC, in place.

    The weight of a layer that is one matrix product is reshaped from RSCK: both versions read its
    memory as one [C_in, C_out] matrix. A weight that is not of the stated layout is left alone, so
    that loading one dictionary twice is harmless; torch's own size check says the rest.
    Raises ContractError when the key is missing.
    """
    if key not in state_dict:
        raise ContractError(f"{_VARIABLE}={layout} is set, but the checkpoint has no {key!r}.")
    weight = state_dict[key]
    ndim, kernel = len(layer.kernel_size), tuple(layer.kernel_size)
    stored = _shapes(layer)[layout]
    if tuple(weight.shape) != stored:
        return
    if layout == "RSCK" and layer.conv1x1:
        c_in, c_out = stored[-2:]
        state_dict[key] = weight.reshape(c_out, *kernel, c_in)
    elif layout == "RSKC":
        state_dict[key] = weight.permute(ndim, *range(ndim), ndim + 1).contiguous()
    else:
        state_dict[key] = weight.permute(ndim + 1, *range(ndim), ndim).contiguous()
