"""MinkowskiEngine 0.5 and 0.4: two profiles of one stand-in."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from ... import settings
from ..base import Framework, choose_profile, interchange_of
from . import profile as profiles

if TYPE_CHECKING:
    from .interchange import from_core, to_core

__all__ = ["ADAPTER", "MinkowskiAdapter", "from_core", "to_core"]

# Upstream puts its own folder on sys.path and imports itself by these names, and so do projects.
_FLAT = (
    "MinkowskiBroadcast",
    "MinkowskiChannelwiseConvolution",
    "MinkowskiCommon",
    "MinkowskiConvolution",
    "MinkowskiCoordinateManager",
    "MinkowskiFunctional",
    "MinkowskiInterpolation",
    "MinkowskiKernelGenerator",
    "MinkowskiNetwork",
    "MinkowskiNonlinearity",
    "MinkowskiNormalization",
    "MinkowskiOps",
    "MinkowskiPooling",
    "MinkowskiPruning",
    "MinkowskiSparseTensor",
    "MinkowskiTensor",
    "MinkowskiTensorField",
    "MinkowskiUnion",
    "MinkowskiCoords",
    "sparse_matrix_functions",
)
# Names that others use as well: answered only where nobody else does.
_SHARED = ("Common", "SparseTensor", "diagnostics", "modules", "utils")


class MinkowskiAdapter(Framework):
    """What the life cycle needs to know about MinkowskiEngine; always the stand-in, see `patch`."""

    name = "minkowski"
    title = "MinkowskiEngine"
    packages = ("MinkowskiEngine", "MinkowskiEngineBackend")
    distributed = ("MinkowskiEngine",)
    main = "MinkowskiEngine"
    tensor = ("MinkowskiEngine", "SparseTensor")
    standin_root = Path(__file__).parent / "standin"
    versions = "0.5, 0.4"
    profiles = ("0.5", "0.4")
    patchable = False
    aliases = MappingProxyType({name: f"MinkowskiEngine.{name}" for name in _FLAT})
    weak_aliases = MappingProxyType({name: f"MinkowskiEngine.{name}" for name in _SHARED})

    def standin_version(self, package: str) -> str | None:
        """The stand-in carries the version of the profile."""
        return profiles.version()

    def begin(self, mode: str, profile: str | None) -> None:
        """Choose the profile: the one asked for, the setting's, or an installed release's."""
        choose_profile(profiles.choose, profile, settings.get().minkowski_profile, _installed)


def _installed() -> tuple[str | None, str]:
    """(profile, reason) of a MinkowskiEngine 0.4 that is installed; it does not answer imports."""
    try:
        version = importlib.metadata.version("MinkowskiEngine")
    except importlib.metadata.PackageNotFoundError:
        return None, ""
    release = profiles.of_version(version)
    if release != "0.4":  # 0.5 is the default, and projects for it may hold branches for 0.4
        return None, ""
    return release, f"MinkowskiEngine {version} is installed"


ADAPTER = MinkowskiAdapter()
__getattr__ = interchange_of(__name__)
