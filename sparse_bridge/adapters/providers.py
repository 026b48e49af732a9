"""Who answers requests for kernel maps besides the builder: prefetch, where it is installed."""

from __future__ import annotations

import contextlib

from ..errors import UnsupportedError
from .base import capture

with contextlib.suppress(UnsupportedError):
    capture("prefetch").install()
