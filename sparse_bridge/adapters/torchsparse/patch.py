"""Seams of an installed torchsparse: functions that its layers and its users look up when they
call.

Layers call `torchsparse.nn.functional.conv3d`, so live models keep their classes. Norms,
activations, quantisation and collation are plain torch and numpy there, and stay.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from ...errors import UnsupportedError
from ..base import Patch
from ..call_stats import note
from ..steps import names_in, package_of
from .conv import conv3d
from .operations import dense, norm
from .profile import of_version
from .signatures import conv3d_arguments
from .upstream import points

_VERSIONS = ">=1.4,<2.2"
_POINT_FUNCTIONS = ("spcount", "spdevoxelize", "sphash", "sphashquery", "spvoxelize")


def installed_profile() -> tuple[str, str]:
    """(profile, version) of the torchsparse that is imported. Raises UnsupportedError."""
    version = str(getattr(sys.modules.get("torchsparse"), "__version__", "unknown"))
    name = of_version(version)
    if name is not None:
        return name, version
    raise UnsupportedError(
        f"torchsparse {version} is installed; the patches are written for 1.4, 2.0 and 2.1. Use "
        "enable('torchsparse', mode='standin', profile=...) before importing torchsparse."
    )


def _convolution(original: Callable[..., Any]) -> Callable[..., Any]:
    functional = vars(sys.modules["torchsparse.nn.functional"])
    # The original computes by way of these, which programs replace.
    steps = [
        (names, name, names[name])
        for names in (original.__globals__, functional)  # type: ignore[attr-defined]
        for name in sorted({*names_in(original)} - {*_POINT_FUNCTIONS, "conv3d"})
        if package_of(names.get(name)) == "torchsparse"
    ]

    @functools.wraps(original)
    def bridged(
        input: Any, weight: Any, kernel_size: Any, bias: Any = None, stride: Any = 1, *args: Any, **kwargs: Any
    ) -> Any:
        options = conv3d_arguments(args, kwargs)
        config = options.get("config")
        reason = next((f"{name} is replaced" for names, name, step in steps if names.get(name) is not step), None)
        if isinstance(config, dict) and config.get("kmap_mode") == "grid":
            reason = "kmap_mode='grid' orders kernel offsets differently"
        if reason is not None:
            note("torchsparse", "Conv3d", reason)
            return original(input, weight, kernel_size, bias, stride, *args, **kwargs)
        return conv3d(input, weight, kernel_size, bias, stride, **options)

    return bridged


def _dense(self: Any) -> Any:
    """[B, X, Y, Z, C]."""
    return dense.to_dense(self.feats, self.coords, self.spatial_range)


def patches() -> list[Patch]:
    """Patches for the torchsparse that is imported. Raises UnsupportedError."""
    release, _ = installed_profile()
    functional = sys.modules["torchsparse.nn.functional"]

    def seam(owner: Any, name: str, replacement: Any, reason: str, wraps: bool = False) -> Patch:
        return Patch(owner, name, replacement, reason, _VERSIONS, wraps)

    seams = [
        seam(functional, "conv3d", _convolution, "all convolutions", wraps=True),
        *(
            seam(functional, name, getattr(points, name), "point-voxel operators on every device")
            for name in _POINT_FUNCTIONS
        ),
        norm.sync_batch_norm_patch(),
    ]
    if release == "2.1":
        why = "its dense grids need a GPU"
        seams.append(seam(sys.modules["torchsparse.utils"], "to_dense", dense.to_dense, why))
        seams.append(seam(sys.modules["torchsparse.tensor"].SparseTensor, "dense", _dense, why))
    return seams
