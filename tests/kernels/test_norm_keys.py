"""Launch keys of the batch norm, checked as in `test_launch_keys`."""

from __future__ import annotations

import itertools

import pytest
import torch

from sparse_bridge.core.ops.batch_norm import batch_norm
from tests.clouds import features

from .test_launch_keys import keys, shifted  # noqa: F401

pytestmark = [pytest.mark.emulated]
HALVES = (torch.float16, torch.float16)
MIXED = (torch.float16, torch.float32)


def test_addresses_shapes_dtypes_and_what_is_missing(kernel_lane, keys):  # noqa: F811
    device = kernel_lane.device
    for channels, (dtype, held) in itertools.product((1, 16, 17, 48), ((torch.float32, torch.float32), HALVES, MIXED)):
        norm = torch.nn.BatchNorm1d(channels).to(device, held)
        x, dy = (features(19, channels, seed, dtype, device) for seed in (0, 1))
        count = torch.tensor([9], dtype=torch.int32, device=device)
        for (a, b), missing in itertools.product(((0, 1), (1, 0)), range(4)):
            weight = None if missing & 1 else norm.weight
            bias = None if missing & 2 else norm.bias
            running = (None, None) if missing == 3 else (norm.running_mean, norm.running_var)
            batches = norm.num_batches_tracked if missing < 2 else None
            batch_norm(
                shifted(x, a).requires_grad_(),
                (weight, bias, *running, batches),
                momentum=1.0,
                eps=1.0,
                relu=bool(missing & 1),
                count=count if missing & 2 else None,
            ).backward(shifted(dy, b))
    assert {name for name, _ in keys} == {
        "batch_norm_partials",
        "batch_norm_apply",
        "batch_norm_grad_partials",
        "batch_norm_dx",
    }
