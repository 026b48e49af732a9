"""The public name of a profile, where the API reference has it; the code is `tools/profiling`."""

from __future__ import annotations

from ..names import modules_of

__getattr__ = modules_of(__name__, "recorder")
