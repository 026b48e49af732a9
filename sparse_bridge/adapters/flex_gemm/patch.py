"""Seams of an installed FlexGEMM 1.x: what its functions look up when they are called.

Its convolutions and its sampling go through `apply` of autograd functions, so whoever imported a
function by name is served as well.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from ..base import Patch
from . import conv, grid_sample
from . import serialize as codes
from .profile import generation
from .tf32 import switch

_VERSIONS = "1.x"


def _instead(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def bridged(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return bridged


def _submanifold(
    feats: Any, coords: Any, shape: Any, neighbor_cache: Any, weight: Any, bias: Any = None,
    dilation: Any = (1, 1, 1),
) -> Any:  # fmt: skip
    """`SubMConv3dFunction.apply`, which takes the cache before the weight."""
    return conv.sparse_submanifold_conv3d(
        feats, coords, shape, weight, bias, neighbor_cache, dilation
    )


def _strided(
    feats: Any, coords: Any, shape: Any, neighbor_cache: Any, weight: Any, bias: Any = None,
    out_coords: Any = None, stride: Any = (1, 1, 1), padding: Any = (0, 0, 0),
    dilation: Any = (1, 1, 1),
) -> Any:  # fmt: skip
    """`SparseConv3dFunction.apply`."""
    return conv.sparse_conv3d(
        feats, coords, shape, weight, bias, neighbor_cache, out_coords, stride, padding, dilation
    )


def patches() -> list[Patch]:
    """Patches for the FlexGEMM that is imported, of either generation."""
    package = sys.modules["flex_gemm"]
    if generation(package) == "2.0":
        from .v2 import patch

        return patch.patches(package)
    spconv = importlib.import_module("flex_gemm.ops.spconv")

    def seam(owner: Any, name: str, function: Callable[..., Any], reason: str) -> Patch:
        replacement = functools.partial(_instead, function)
        return Patch(owner, name, replacement, reason, _VERSIONS, wraps=True)

    found = [
        seam(spconv.SubMConv3dFunction, "apply", _submanifold, "submanifold convolution"),
        seam(
            spconv.SubMConv3dFunction, "_compute_neighbor_cache",
            conv.SubMConv3dFunction._compute_neighbor_cache, "caches that users ask for",
        ),
        seam(
            importlib.import_module("flex_gemm.ops.grid_sample").GridSample3dFunction, "apply",
            grid_sample.grid_sample_3d, "sampling of voxels at points",
        ),
    ]  # fmt: skip
    if hasattr(spconv, "SparseConv3dFunction"):
        found.append(seam(spconv.SparseConv3dFunction, "apply", _strided, "strided convolution"))
    if hasattr(package.ops, "serialize"):
        serialize = importlib.import_module("flex_gemm.ops.serialize")
        for name in ("encode_seq", "decode_seq"):
            found.append(seam(serialize, name, getattr(codes, name), "codes of voxels"))
    return found + switch("flex_gemm.kernels.triton.spconv.config", "allow_tf32", _VERSIONS)
