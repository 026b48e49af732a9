"""What `tests.host_time` measures is what it says."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch

from sparse_bridge import hooks
from sparse_bridge.core.conv import convolution
from tests.host_time import layers, pairs, steps, stream, streamed, sums, times
from tests.walk_apis import pretended_gpu

pytest.importorskip("triton")


@contextlib.contextmanager
def counted_norms():
    """torch's own batch norm, which nothing is fused without."""
    alone = mock.Mock(wraps=torch.batch_norm)
    with mock.patch.object(torch, "batch_norm", alone), mock.patch.object(hooks, "TORCHS_BATCH_NORM", alone):
        yield alone


@pytest.mark.parametrize(("worth", "norms"), [(1 << 62, 3), (0, 0)])
def test_norms_run_apart_or_in_the_launch(worth, norms):
    seen = {}
    with torch.no_grad(), pretended_gpu(), mock.patch.object(convolution, "MIN_DEFERRED_ELEMENTS", [worth] * 2):
        for name, run in layers():
            for _ in range(3):
                assert run().shape == (24, 32)
            with counted_norms() as alone:
                run()
            seen[name] = alone.call_count
    assert len(seen) == 5 and sum(seen.values()) == norms, seen


@pytest.mark.parametrize(("worth", "norms"), [(1 << 62, 2), (0, 0)])
def test_sums_run_apart_or_in_the_launch(worth, norms):
    alone = []
    with torch.no_grad(), pretended_gpu(), mock.patch.object(convolution, "MIN_DEFERRED_ELEMENTS", [worth] * 2):
        for _, run in sums():
            for _ in range(3):
                run()
            with counted_norms() as norm:
                run()
            alone.append(norm.call_count)
    assert len(alone) == 3 and sum(alone) == norms, alone


def test_layers_train():
    with pretended_gpu(), pairs():
        for name, run in layers(training=True):
            assert run().requires_grad, name


def test_times_are_of_one_call():
    least, median = times(lambda: sum(range(1000)), 3, 20)
    assert 0 < least <= median


THIN = {"encoder": (8, 8, 16, 16), "decoder": (16, 16, 8, 8), "stem": 8}


def test_scenes_of_a_stream_wait_in_turns(monkeypatch):
    original, seen, alone = torch.batch_norm, [], {}

    def counted(*args):
        seen.append(convolution.MIN_DEFERRED_ELEMENTS[0])
        return original(*args)

    monkeypatch.setattr(torch, "batch_norm", counted)
    monkeypatch.setattr(hooks, "TORCHS_BATCH_NORM", counted)
    for name, net, scene in stream(**THIN):
        counts = []
        for rounds in (1, 2):
            seen.clear()
            taken = streamed(net, scene, rounds)
            counts.append([seen.count(1 << 62), seen.count(0)])
            assert [len(one) for one in taken.values()] == [rounds, rounds]
        alone[name] = [more - fewer for fewer, more in zip(*counts, strict=True)]
    # Norms of a scene that run by themselves: behind 1x1 layers, and all where a network calls
    # them one by one and nothing is deferred.
    assert alone == {"spconv": [50, 4], "torchsparse": [4, 4], "MinkowskiEngine": [30, 5]}


def test_steps_are_of_whole_networks(monkeypatch):
    reached = []
    backward = torch.autograd.backward
    monkeypatch.setattr(
        torch.autograd, "backward", lambda y, *args, **more: reached.append(y.shape[0]) or backward(y, *args, **more)
    )
    found = steps(2, **THIN)
    assert list(found) == ["spconv", "torchsparse", "MinkowskiEngine"]
    assert all(len(one) == 2 and min(one) > 0 for passes in found.values() for one in passes)
    assert reached == [24] * 3 * (2 + 4)
