"""Checkpoints of older spconv versions, brought to the layout of spconv 2.2 and later."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import ContractError

__all__ = ["convert_layout"]


def convert_layout(state_dict: dict[str, torch.Tensor], key: str, layout: str, layer: Any) -> None:
    """Permute `state_dict[key]` from `layout` ("RSKC": spconv 2.0 / 2.1 Native, "RSCK": spconv 1.x) to KRSC, in place.

    A kernel of volume 1 in RSCK is reshaped: both versions read its memory as one [C_in, C_out] matrix.
    A weight that already has the layer's shape but not the stated layout is left alone, so that loading the same
    dictionary twice is harmless. Raises ContractError when the key is missing.
    """
    if key not in state_dict:
        raise ContractError(
            f"SPCONV_SAVED_WEIGHT_LAYOUT={layout} is set, but the checkpoint has no {key!r}."
        )
    weight = state_dict[key]
    ndim = len(layer.kernel_size)
    kernel = tuple(layer.kernel_size)
    c_in, c_out = layer.in_channels // layer.groups, layer.out_channels
    stored = (*kernel, c_out, c_in) if layout == "RSKC" else (*kernel, c_in, c_out)
    if tuple(weight.shape) != stored:
        return  # torch's own size check says the rest
    if layout == "RSCK" and layer.conv1x1:
        state_dict[key] = weight.reshape(c_out, *kernel, c_in)
    elif layout == "RSKC":
        state_dict[key] = weight.permute(ndim, *range(ndim), ndim + 1).contiguous()
    else:
        state_dict[key] = weight.permute(ndim + 1, *range(ndim), ndim).contiguous()
