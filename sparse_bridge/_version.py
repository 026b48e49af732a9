"""Version of the package, and in a source checkout its commit."""

from __future__ import annotations

import pathlib
import subprocess

__version__ = "0.2.0"

_ROOT = pathlib.Path(__file__).resolve().parents[1]


def commit(root: pathlib.Path = _ROOT) -> tuple[str, bool]:
    """The short name of the commit that is checked out, and whether files differ from it; an empty name where `root`
    is no checkout of this package, or there is no git."""
    try:
        if 'name = "sparse-bridge"' not in (root / "pyproject.toml").read_text(encoding="utf-8"):
            return "", False
        # A checkout on a mounted disk belongs to somebody else as often as not.
        git = ["git", "-c", "safe.directory=*", "-C", str(root)]
        top, name = _lines([*git, "rev-parse", "--show-toplevel", "--short", "HEAD"])
        if not pathlib.Path(top).samefile(root):
            return "", False
        return name, bool(_lines([*git, "status", "--porcelain", "-uno"]))
    except (OSError, ValueError, subprocess.SubprocessError):
        return "", False


def _lines(command: list[str]) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.splitlines()


def described() -> str:
    """The version; in a checkout with the commit, as "0.2.0+g1a2b3c4", and ".dirty" where files differ from it."""
    name, changed = commit()
    return f"{__version__}+g{name}{'.dirty' * changed}" if name else __version__
