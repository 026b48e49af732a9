from __future__ import annotations

from ...names import modules_of

__getattr__ = modules_of(__name__, "sparse_data")
