"""Launch keys of the depthwise and first-maximum kernels, checked as in `test_launch_keys`."""

from __future__ import annotations

import itertools

import pytest
import torch

from sparse_bridge.core import functional
from sparse_bridge.core.conv.depthwise import channelwise
from sparse_bridge.core.ops.max_rows import window_max
from tests.clouds import cloud, features

from .test_launch_keys import keys, shifted  # noqa: F401

pytestmark = [pytest.mark.emulated]


def test_addresses_shapes_and_dtypes(kernel_lane, keys):  # noqa: F811
    for n, channels, dtype in itertools.product((1, 16, 33), (1, 16, 17), (torch.float32, torch.float16)):
        coords = cloud((4 * n,), 1, 0.9)[: 2 * n].contiguous().to(kernel_lane.device)
        cmap = functional.coordinate_map(coords)
        kmap = functional.submanifold(cmap, functional.kernel_offsets((3,)))
        x = features(kmap.n_in, channels, dtype=dtype, device=kernel_lane.device)
        weight = features(3, channels, 1, dtype, kernel_lane.device)
        dy = features(kmap.n_out, channels, 2, dtype, kernel_lane.device)
        for a, b, c in itertools.product((0, 1), repeat=3):
            leaf, leaf_weight = shifted(x, a).requires_grad_(), shifted(weight, b).requires_grad_()
            gradient = shifted(dy, c)
            channelwise(leaf, leaf_weight, kmap).backward(gradient)
            window_max(leaf, kmap).backward(gradient)
    assert {name for name, _ in keys} >= {
        "channelwise_gather",
        "channelwise_wgrad",
        "window_max",
        "window_max_backward",
    }
