"""The functions of `core.functional`, entered there, for the operators that serve them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

functions: dict[str, Callable[..., Any]] = {}
