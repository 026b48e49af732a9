"""The checks of a proof, by name: read, and refused, before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import SettingError
from ...names import meant

# Module and function of each, in the order in which they run: what is quick and tells most comes first.
CHECKS = {
    "self-check": ("self_checks", "self_check"),
    "maps": ("kernels", "maps"),
    "products": ("kernels", "products"),
    "pools": ("kernels", "pools"),
    "networks": ("models", "networks"),
    "determinism": ("models", "determinism"),
    "training": ("models", "training"),
    "cold start": ("models", "cold_start"),
    "large": ("large", "large"),
    "speed": ("speed", "speed"),
    "goldens": ("goldens", "goldens"),
}


def chosen(only: Sequence[str], skip: Sequence[str]) -> list[str]:
    """Names of the checks to run.

    Raises: SettingError for one that is unknown, and where none is left.
    """
    unknown = sorted({*only, *skip} - set(CHECKS))
    if unknown:
        raise SettingError(
            f"no check is called {', '.join(map(repr, unknown))}; expected some of {', '.join(map(repr, CHECKS))}."
            + meant(unknown[0], CHECKS)
        )
    names = [name for name in CHECKS if (not only or name in only) and name not in skip]
    if not names:
        raise SettingError("--only and --skip leave no check to run; expected one or more. Skip fewer.")
    return names
