"""Networks over streams of scenes launch the same with the helper and without."""

from __future__ import annotations

import contextlib
import itertools
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from sparse_bridge.core.device import rocm
from sparse_bridge.core.ops import pointwise
from sparse_bridge.kernels.gemm import grouped_gemm, narrow_gemm  # noqa: F401  (kernels)
from tests.core.prefetch import map_time
from tests.native.recording import RANDOM, Recorder, anew, helper, remembered, served, way

APIS = ["spconv, SECOND", "spconv, U-Net", "torchsparse, U-Net", "MinkowskiEngine, U-Net"]


def _product(x, w, bias=None):
    return x.new_empty(x.shape[0], w.shape[1])  # of halves a CPU is slow


def streamed(api, chosen, rounds):
    """(launches, what is remembered, what the helper did) of a network over scenes."""
    recorder = Recorder()
    torch.manual_seed(1)
    with anew(), way(chosen), recorder.recording(map_time), contextlib.ExitStack() as stack:
        for owner, name, value in (
            (pointwise, "DEVICES", ("cpu",)),
            (rocm, "linear", _product),
            (rocm, "mm", _product),
            (map_time, "_numbers", itertools.count()),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        for name, net, scene in map_time.networks(lambda i: 80 + 8 * (i % 3)):
            if name == api:
                recorder.name(net.half())
                with served() as by_helper:
                    map_time.streamed(net, scene, rounds)
                return recorder.lines, remembered(net), by_helper
    raise AssertionError(api)


def alike(api, ways, rounds):
    helper()
    want, known, by_helper = streamed(api, "off", rounds)
    assert len(want) > 40 and known and not any(by_helper.values())
    for name in ways:
        lines, remembers, by_helper = streamed(api, name, rounds)
        for place, (one, other) in enumerate(zip(lines, want, strict=False)):
            assert one == other, (name, place)
        assert len(lines) == len(want) and remembers == known, name
        assert by_helper["known_call"] > 5, name


def test_a_stream_of_scenes():
    alike(APIS[0], ["on", "refused 2.0%, 1"], 3)


@pytest.mark.slow
@pytest.mark.parametrize("api", APIS)
def test_longer_streams(api):
    """Of thousands of calls, so that one seed refuses everywhere."""
    alike(api, ["on", *(name for name in RANDOM if name.endswith(", 1"))], 8)
