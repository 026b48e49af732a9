"""Invented frameworks on disk: a real library (working, broken or absent) and its stand-in."""

from __future__ import annotations

import pathlib
import textwrap

from sparse_bridge.adapters import call_stats
from sparse_bridge.adapters.base import Framework, Patch

REAL_CONV = """
    class Base:
        \"\"\"Upstream's base.\"\"\"

        def forward(self, x, scale=1):
            \"\"\"Upstream's forward.\"\"\"
            return ("original", x * scale)

        @staticmethod
        def shape(x):
            return ("original", x)

        @classmethod
        def build(cls):
            return ("original", cls.__name__)


    class Conv(Base):
        pass


    def gather(x):
        return ("original", x)
"""
STANDIN_CONV = """
    class Conv:
        def __init__(self, width):
            self.width = width

        def forward(self, x):
            return ("standin", x)
"""


def write(path: pathlib.Path, text: str = "") -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def write_real(site: pathlib.Path, name: str, broken: bool = False) -> None:
    """`<name>.engine` is the framework's main module; a broken one fails half way through it."""
    failure = "raise OSError('libfake.so.11: cannot open shared object')" if broken else ""
    write(site / name / "__init__.py", "__version__ = '9.1.0'\n")
    write(site / name / "engine" / "__init__.py", f"from .conv import *\n{failure}\n")
    write(site / name / "engine" / "conv.py", REAL_CONV)
    write(site / name / "only_real.py")


def write_standin(root: pathlib.Path, name: str) -> None:
    """The same module names, and a companion package `<name>_tv`."""
    write(root / name / "__init__.py", "__version__ = '9.0.3'\nfrom . import constants\n")
    write(root / name / "constants.py", "DEBUG = False\n")
    write(root / name / "engine" / "__init__.py", "from .conv import Conv\n")
    write(root / name / "engine" / "conv.py", STANDIN_CONV)
    write(root / f"{name}_tv" / "__init__.py", "__version__ = '1.2.3'\n")
    write(root / f"{name}_tv" / "view.py", "def view(x): return x\n")


def bridged_forward(self, x, scale=1):
    """The adapter's own docstring."""
    call_stats.note("fake", type(self).__name__)
    return ("bridged", x * scale)


class FakeAdapter(Framework):
    """Patches every kind of seam: own, inherited, static, class and module level."""

    versions = ">=9,<10"

    def __init__(self, name: str, standin_root: pathlib.Path) -> None:
        self.name = name
        self.packages = (name, f"{name}_tv")
        self.main = f"{name}.engine"
        self.standin_root = standin_root

    def conv_module(self):
        import importlib

        return importlib.import_module(f"{self.name}.engine.conv")

    def patches(self) -> list[Patch]:
        conv = self.conv_module()
        rest = {"reason": "test", "versions": self.versions}
        return [
            Patch(conv.Conv, "forward", self._factory, **rest, wraps=True),
            Patch(conv.Base, "forward", bridged_forward, **rest),
            Patch(conv.Base, "shape", lambda x: ("bridged", x), **rest),
            Patch(conv.Base, "build", lambda cls: ("bridged", cls.__name__), **rest),
            Patch(conv, "gather", lambda x: ("bridged", x), **rest),
        ]

    def _factory(self, original):
        def forward(self_, x, scale=1):
            if scale == 1:
                call_stats.note(self.name, "Conv")
                return ("bridged", x)
            call_stats.note(self.name, "Conv", reason=f"scale={scale} unsupported")
            return original(self_, x, scale)

        return forward

    def notes(self) -> list[str]:
        return ["profile 9"]
