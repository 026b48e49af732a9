"""Tests of what only newer releases of torch and Triton can do."""

from __future__ import annotations

import pytest

from sparse_bridge.core.device.torch_compat import RELEASE
from sparse_bridge.kernels.runtime.target import triton_version


def since(major: int, minor: int, what: str) -> pytest.MarkDecorator:
    """Skip before torch `major`.`minor`; what: its reason, as docs/compile.md has it."""
    return pytest.mark.skipif((major, minor) > RELEASE, reason=f"before torch {major}.{minor} {what}")


def triton_since(major: int, minor: int, what: str) -> pytest.MarkDecorator:
    """Skip before Triton `major`.`minor`; what: its reason."""
    found = triton_version()
    return pytest.mark.skipif(
        found is not None and found < (major, minor), reason=f"before Triton {major}.{minor} {what}"
    )


WHOLE_GRAPHS = since(2, 8, "layers run between graphs")
