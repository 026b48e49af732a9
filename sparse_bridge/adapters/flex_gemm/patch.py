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

import torch

from ...errors import UnsupportedError
from ..base import Patch
from ..call_stats import note
from ..steps import package_of
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


_BRIDGES = "bridges_flex_gemm"  # an attribute of what is put in the place of theirs


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _constant(function: Callable[[], str | None]) -> str | None:
    """What it answers while a graph is made."""
    return function()


class _Parts:
    """An autograd function of theirs: who replaces a part of it, in a subclass or for good, is obeyed."""

    def __init__(self, theirs: Any, ours: Any) -> None:
        names = ("forward", *(name for name in _PARTS if hasattr(theirs, name) and hasattr(ours, name)))
        # One that somebody had replaced before stays, without the mark.
        self.bridged = [name for name in names if package_of(getattr(theirs, name)) == package_of(theirs)]
        self._names, self._theirs, self._backward = ("apply", *names), theirs, theirs.backward

    def refusal(self, function: Any = None) -> str | None:
        """Why a call of the function, or of a subclass of it, must run there."""
        function = self._theirs if function is None else function
        backward = function.backward
        if backward is not self._backward or package_of(backward) != package_of(self._theirs):
            return "backward is overridden"
        replaced = (name for name in self._names if not hasattr(getattr(function, name), _BRIDGES))
        name = next(replaced, None)
        return None if name is None else f"{name} is overridden"


def _instead(
    function: Callable[..., Any], of_class: bool, parts: _Parts | None, original: Callable[..., Any]
) -> Callable[..., Any]:
    """of_class: the original is a class method, as torch's own `apply` is.  parts: of the autograd
    function that the original is, or goes through."""

    refused = (lambda function=None: None) if parts is None else parts.refusal

    def here() -> str | None:
        return refused()

    @functools.wraps(original)
    def bridged(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # of a subclass, compilers look into what it overrides
            reason = _constant(here)
        else:
            reason = refused(args[0] if of_class else None)
        if reason is None:
            return function(*args[of_class:], **kwargs)
        if of_class:  # the function around it has no layer of its own to count
            note("flex_gemm", args[0].__name__, reason)
        return original(*args, **kwargs)

    setattr(bridged, _BRIDGES, True)
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
    applied: list[tuple[Any, str, Callable[..., Any], Any]] = [
        (spconv, "SubMConv3dFunction", _submanifold, conv.SubMConv3dFunction),
        (spconv, "SparseConv3dFunction", _strided, conv.SparseConv3dFunction),  # not before 1.1
        (grid, "GridSample3dFunction", grid_sample.grid_sample_3d, None),
    ]
    result, parts = [], {}
    for owner, name, apply, ours in applied:
        if hasattr(owner, name):
            parts[name] = _Parts(getattr(owner, name), ours)
            result += _function(getattr(owner, name), apply, ours, parts[name])
    functions: list[tuple[Any, ...]] = [
        (spconv, "sparse_submanifold_conv3d", conv.sparse_submanifold_conv3d, parts["SubMConv3dFunction"]),
        (spconv, "sparse_conv3d", conv.sparse_conv3d, parts.get("SparseConv3dFunction")),
        (grid, "grid_sample_3d", grid_sample.grid_sample_3d, parts["GridSample3dFunction"]),
        (grid, "grid_sample_3d_torch", grid_sample.grid_sample_3d),
    ]
    if hasattr(package.ops, "serialize"):
        serialize = importlib.import_module("flex_gemm.ops.serialize")
        functions += [(serialize, name, getattr(codes, name)) for name in codes.__all__]
    result += [_seam(*entry) for entry in functions if hasattr(entry[0], entry[1])]
    return result + switch("flex_gemm.kernels.triton.spconv.config", "allow_tf32", _VERSIONS)


def _seam(owner: Any, name: str, function: Callable[..., Any], parts: _Parts | None = None) -> Patch:
    of_class = isinstance(inspect.getattr_static(owner, name), classmethod)
    replacement = functools.partial(_instead, function, of_class, parts)
    return Patch(owner, name, replacement, "functions on plain tensors", _VERSIONS, wraps=True)


def _function(theirs: Any, apply: Callable[..., Any], ours: Any, parts: _Parts) -> list[Patch]:
    """Of an autograd function: `apply`, and the parts that users call."""
    result = [_seam(theirs, "apply", apply, parts)]
    for name in parts.bridged:
        if name == "forward":
            result.append(Patch(theirs, name, _forward, "functions on plain tensors", _VERSIONS, wraps=True))
        else:
            result.append(_seam(theirs, name, getattr(ours, name)))
    return result


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Compilers look into the function instead of calling `apply`: they are refused."""

    def bridged(*args: Any) -> Any:
        from ...core.traced.graphs import outside

        return outside(_refuse) if torch.compiler.is_compiling() else original(*args)

    setattr(bridged, _BRIDGES, True)
    return bridged


def _refuse() -> None:
    raise UnsupportedError("forward of an autograd function of FlexGEMM was called by itself; call its apply.")
