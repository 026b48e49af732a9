"""torchsparse 2.1, 2.0 and 1.4: three profiles of one adapter."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING

from ... import settings
from ...errors import LifecycleError
from ..base import Framework, Patch, choose_profile, interchange_of

if TYPE_CHECKING:
    from .interchange import from_core, to_core

__all__ = ["ADAPTER", "TorchsparseAdapter", "from_core", "to_core"]


class TorchsparseAdapter(Framework):
    """What the life cycle needs to know about torchsparse."""

    name = "torchsparse"
    title = "torchsparse"
    packages = ("torchsparse",)
    main = "torchsparse.nn"
    tensor = ("torchsparse", "SparseTensor")
    standin_root = Path(__file__).parent / "standin"
    versions = ">=1.4,<2.2"
    profiles = ("2.1", "2.0", "1.4")

    def standin_patches(self) -> list[Patch]:
        """Of torch's own modules that hold the stand-in's layers or take their place."""
        from .operations.norm import sync_batch_norm_patch
        from .sequence import sequential_patches

        return [sync_batch_norm_patch(), *sequential_patches()]

    def standin_version(self, package: str) -> str | None:
        """The stand-in carries the version of the profile."""
        from . import profile

        return profile.peek().version

    def begin(self, mode: str, profile: str | None) -> None:
        """Choose the profile. Raises LifecycleError, UnsupportedError."""
        from . import profile as profiles

        configured = settings.get().torchsparse_profile
        if mode == "patch":
            from .patch import installed_profile

            installed, version = installed_profile()
            requested = profile or configured
            if requested not in ("auto", installed):
                raise LifecycleError(
                    f"profile {requested!r} was asked for, but torchsparse {version} is installed, "
                    f"which is profile {installed!r}. Leave the profile out, or use mode='standin' "
                    "before torchsparse is imported."
                )
            profiles.choose(installed, f"torchsparse {version} is installed")
        else:
            choose_profile(profiles.choose, profile, configured, _declared)


def _declared() -> tuple[str | None, str]:
    """(profile, reason) of a torchsparse that is installed although it does not answer imports."""
    from .profile import of_version

    try:
        version = importlib.metadata.version("torchsparse")
    except importlib.metadata.PackageNotFoundError:
        return None, ""
    profile = of_version(version)
    return profile, "" if profile is None else f"torchsparse {version} is installed"


ADAPTER = TorchsparseAdapter()
__getattr__ = interchange_of(__name__)
