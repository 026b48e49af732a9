"""What graphs need of the torch that runs the tests."""

import pytest
import torch

from sparse_bridge.core.device.torch_compat import RELEASE


@pytest.fixture(autouse=True)
def whole_graphs():
    """Before torch 2.10 `fullgraph=True` leaves this switch to the user (docs/compile.md)."""
    changed = {} if RELEASE >= (2, 10) else {"capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(changed):
        yield
