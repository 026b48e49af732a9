"""Who answers requests for kernel maps besides the builder: prefetch, where it is installed.

Adapters import this module for what importing it does; without `core.capture` maps are built when
they are asked for.
"""

from __future__ import annotations

import contextlib

from ..errors import UnsupportedError
from . import base

with contextlib.suppress(UnsupportedError):
    base.capture("prefetch").install()
