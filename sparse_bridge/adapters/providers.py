"""Who answers requests for kernel maps besides the builder: prefetch, where it is installed, and
who looks for parts of models to replay when layers make them.

Adapters import this module for what importing it does; without `core.prefetch` maps are built when
they are asked for.
"""

from __future__ import annotations

import contextlib

from ..errors import UnsupportedError
from . import base, protocol

with contextlib.suppress(UnsupportedError):
    base.prefetch().install()
    base.capture("graph_regions").install(protocol.of, protocol.n_layers)
