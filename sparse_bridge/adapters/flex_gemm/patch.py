"""Seams of an installed FlexGEMM 1.x: what its functions look up when they are called.

Its convolutions and its sampling go through `apply` of autograd functions, so whoever imported a
function by name is served as well; in a compiled program that is a break, and the functions
themselves, looked up after `enable()`, are operators.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

from ...errors import UnsupportedError
from ..base import Patch
from . import conv, grid_sample
from . import serialize as codes
from .options import switch
from .profile import generation

_VERSIONS = "1.x"
_PARTS = (
    "_compute_neighbor_cache",
    "_compute_neighbor_cache_torch",
    "_get_output_coords",
    "_get_output_coords_torch",
    "_sparse_submanifold_conv_forward",
    "_sparse_submanifold_conv_backward",
    "_sparse_conv_forward",
    "_sparse_conv_backward",
)


def _instead(function: Callable[..., Any], of_class: bool, original: Callable[..., Any]) -> Callable[..., Any]:
    """of_class: the original is a class method, as torch's own `apply` is."""

    @functools.wraps(original)
    def bridged(*args: Any, **kwargs: Any) -> Any:
        return function(*args[of_class:], **kwargs)

    return bridged


def _submanifold(
    feats: Any, coords: Any, shape: Any, neighbor_cache: Any, weight: Any, bias: Any = None, dilation: Any = (1, 1, 1)
) -> Any:
    """`SubMConv3dFunction.apply`, which takes the cache before the weight."""
    return conv.sparse_submanifold_conv3d(feats, coords, shape, weight, bias, neighbor_cache, dilation)


def _strided(
    feats: Any,
    coords: Any,
    shape: Any,
    neighbor_cache: Any,
    weight: Any,
    bias: Any = None,
    out_coords: Any = None,
    stride: Any = (1, 1, 1),
    padding: Any = (0, 0, 0),
    dilation: Any = (1, 1, 1),
) -> Any:
    """`SparseConv3dFunction.apply`."""
    return conv.sparse_conv3d(feats, coords, shape, weight, bias, neighbor_cache, out_coords, stride, padding, dilation)


def patches() -> list[Patch]:
    """Patches for the FlexGEMM that is imported, of either generation."""
    package = sys.modules["flex_gemm"]
    if generation(package) == "2.0":
        from .v2 import patch

        return patch.patches(package)
    spconv = importlib.import_module("flex_gemm.ops.spconv")
    grid = importlib.import_module("flex_gemm.ops.grid_sample")
    result = _function(spconv.SubMConv3dFunction, _submanifold, conv.SubMConv3dFunction)
    result += _function(grid.GridSample3dFunction, grid_sample.grid_sample_3d, None)
    if hasattr(spconv, "SparseConv3dFunction"):  # not before 1.1
        result += _function(spconv.SparseConv3dFunction, _strided, conv.SparseConv3dFunction)
    functions: list[tuple[Any, str, Callable[..., Any]]] = [
        (spconv, "sparse_submanifold_conv3d", conv.sparse_submanifold_conv3d),
        (spconv, "sparse_conv3d", conv.sparse_conv3d),
        (grid, "grid_sample_3d", grid_sample.grid_sample_3d),
        (grid, "grid_sample_3d_torch", grid_sample.grid_sample_3d),
    ]
    if hasattr(package.ops, "serialize"):
        serialize = importlib.import_module("flex_gemm.ops.serialize")
        functions += [(serialize, name, getattr(codes, name)) for name in codes.__all__]
    result += [_seam(*entry) for entry in functions if hasattr(entry[0], entry[1])]
    return result + switch("flex_gemm.kernels.triton.spconv.config", "allow_tf32", _VERSIONS)


def _seam(owner: Any, name: str, function: Callable[..., Any]) -> Patch:
    of_class = isinstance(inspect.getattr_static(owner, name), classmethod)
    replacement = functools.partial(_instead, function, of_class)
    return Patch(owner, name, replacement, "functions on plain tensors", _VERSIONS, wraps=True)


def _function(theirs: Any, apply: Callable[..., Any], ours: Any) -> list[Patch]:
    """Of an autograd function: `apply`; the parts that users call; and `forward`, which is reached
    by compilers alone: they look into the function instead of calling `apply`."""
    result = [_seam(theirs, "apply", apply), _seam(theirs, "forward", _not_in_a_graph)]
    parts = [name for name in _PARTS if hasattr(theirs, name) and hasattr(ours, name)]
    return result + [_seam(theirs, name, getattr(ours, name)) for name in parts]


def _not_in_a_graph(*args: Any) -> Any:
    from ...core.traced.graphs import outside

    return outside(_refuse)


def _refuse() -> None:
    raise UnsupportedError("forward of an autograd function of FlexGEMM was called by itself; call its apply.")
