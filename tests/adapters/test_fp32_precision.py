"""Programs that set `fp32_precision`, after which torch refuses to say how its older switch stands."""

from __future__ import annotations

import pytest
import torch

import sparse_bridge
from sparse_bridge.core.device.torch_compat import allows_tf32
from tests.robustness.networks import FRAMEWORKS, features_of, network, scene, tensor_of

pytestmark = pytest.mark.skipif(
    not hasattr(torch._C, "_get_fp32_precision_getter"), reason="fp32_precision is of torch 2.9"
)


@pytest.fixture
def precision():
    """Sets it, for the time of a test."""
    matmul = torch.backends.cuda.matmul
    yield lambda value: setattr(matmul, "fp32_precision", value)
    matmul.fp32_precision = "none"


@pytest.mark.parametrize(("value", "tf32"), [("tf32", True), ("ieee", False), ("none", False)])
def test_what_the_program_set(precision, value, tf32):
    precision(value)
    if value == "tf32":
        with pytest.raises(RuntimeError):
            bool(torch.backends.cuda.matmul.allow_tf32)
    assert allows_tf32() == tf32


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_layers_of_a_framework(precision, framework):
    with sparse_bridge.enable(framework):
        net, given = network(framework, 4, 6, "cpu"), scene(3, 4, "cpu")
        expected = features_of(net(tensor_of(framework, given, given.x)))
        precision("tf32")
        y = features_of(net(tensor_of(framework, given, given.x)))
        assert torch.equal(y, expected)
        y.square().sum().backward()
