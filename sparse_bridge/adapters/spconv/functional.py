"""The functional layer below spconv's modules: kernel maps or pair tensors in, features out."""

from __future__ import annotations

from typing import Any

import torch

from ...core.arguments import expect_tensors
from ...core.conv.epilogue import Epilogue
from ...core.maps.kernel_map import KernelMap
from ...core.ops import pool as core_pool
from .conv import ACTIVATIONS, convolve
from .geometry import LayerGeometry
from .maps import layer_map
from .rules.row_order import row_order
from .rules.switches import uses_direct_table
from .tensors import check_parameters


def build_map(
    indices: torch.Tensor,
    batch_size: int,
    spatial_shape: Any,
    geometry: LayerGeometry,
    algo: Any,
    direct_table: bool | None = None,
    original: bool = False,
) -> tuple[torch.Tensor, KernelMap]:
    """(output indices [M, 1 + nd] int32, kernel map) of one layer geometry.

    algo, direct_table, original: see `row_order`; None: the switch.
    """
    expect_tensors("the layer", indices=indices)
    shape = [int(size) for size in spatial_shape]
    table = uses_direct_table() if direct_table is None else direct_table
    order = row_order(algo, table, indices.device.type, original)
    built = layer_map(indices, int(batch_size), shape, geometry, order, "the layer")
    return built.indices, built.kmap


def convolution(
    features: torch.Tensor,
    filters: torch.Tensor,
    kmap: KernelMap,
    bias: torch.Tensor | None = None,
    act_alpha: float = 0.0,
    act_type: Any = None,
) -> torch.Tensor:
    """features [N, C], filters KRSC -> [M, K]; features, filters and bias get gradients."""
    expect_tensors("the convolution", features=features, filters=filters)
    check_parameters(features, filters, "the convolution")
    epilogue = Epilogue(bias, ACTIVATIONS[getattr(act_type, "name", "None_")], act_alpha)
    return convolve(features, filters, epilogue, kmap)


def conv_backward(
    features: torch.Tensor, filters: torch.Tensor, kmap: KernelMap, out_bp: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Gradients of features and filters, for the output gradient `out_bp`."""
    with torch.enable_grad():
        leaves = features.detach().requires_grad_(), filters.detach().requires_grad_()
        return torch.autograd.grad(convolution(*leaves, kmap), leaves, out_bp)


def max_pool(features: torch.Tensor, kmap: KernelMap) -> torch.Tensor:
    """max(0, window)."""
    return core_pool.pool(features, kmap, "max", floor=0.0)


def avg_pool(features: torch.Tensor, kmap: KernelMap) -> torch.Tensor:
    """Mean over the present inputs."""
    return core_pool.pool(features, kmap, "avg")


def max_pool_backward(
    features: torch.Tensor, out: torch.Tensor, out_bp: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    """Gradient of features; table [V, N]: window of every input row."""
    gradient = torch.zeros_like(features, dtype=torch.promote_types(features.dtype, torch.float32))
    for column in table:
        rows = (column >= 0).nonzero().squeeze(1)
        windows = column.index_select(0, rows)
        share = out_bp.index_select(0, windows)
        equal = features.index_select(0, rows) == out.index_select(0, windows)
        gradient.index_add_(0, rows, (share * equal).to(gradient.dtype))
    return gradient.to(features.dtype)


def avg_pool_backward(out_bp: torch.Tensor, table: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Every input takes 1 / count of its windows' gradients; table [V, N]."""
    share = out_bp / counts.clamp(min=1).unsqueeze(1).to(out_bp.dtype)
    n_rows = table.shape[1]
    gradient = out_bp.new_zeros((n_rows, out_bp.shape[1]), dtype=torch.promote_types(out_bp.dtype, torch.float32))
    for column in table:
        rows = (column >= 0).nonzero().squeeze(1)
        gradient.index_add_(0, rows, share.index_select(0, column.index_select(0, rows)).to(gradient.dtype))
    return gradient.to(out_bp.dtype)
