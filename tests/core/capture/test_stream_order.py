"""Programs that use several streams get what they would have got on one: whatever is shared between
streams is waited for. Without a GPU the order of all accesses is looked at instead."""

from __future__ import annotations

import concurrent.futures
import copy
import itertools
import pickle
import time

import pytest
import torch

from sparse_bridge import settings
from sparse_bridge.adapters import protocol
from sparse_bridge.core.capture import captured_maps, captured_model, graph_regions, replay_training
from sparse_bridge.core.capture.graph_capture import GraphMemory
from sparse_bridge.core.capture.graphed_module import GraphedModule
from sparse_bridge.core.device import stream_order
from sparse_bridge.core.prefetch import prefetch
from tests.core.capture.graph_sizes import graphs_of

from . import apis
from .pretended import replays_on_the_cpu, watched
from .pretended_streams import Race, Streams, Watching


@pytest.fixture(autouse=True)
def fresh(rules, nothing_learnt):
    """Nothing learnt yet, and classes of few rows."""
    rules.hold(graphs_of(160))


def results(model, x, trains=False):
    """Coordinates and features; gradients where it trains."""
    model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(trains):
        found = model(x)
    values = [protocol.features_of(found[key]) for key in ("out", "deep")]
    if trains:
        (values[0].square().sum() + values[1].sum()).backward()
        values += [p.grad for p in model.parameters()]
    return [protocol.of(found["out"]).coordinates_of(found["deep"]).clone(), *values]


def same(mine, theirs):
    for one, other in zip(mine, theirs, strict=True):
        scale = float(other.detach().abs().max())
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3 * scale)


def test_the_watch_sees_what_is_not_ordered():
    streams, values = Streams(), torch.zeros(4)
    one, other = streams.new(), streams.new()
    with Watching(streams):
        with streams.on(one):
            values.add_(1)
        with streams.on(other):
            with pytest.raises(Race, match="add_"):
                values.sum()
            other.wait_stream(one)
            values.sum()
        with streams.on(one):
            with pytest.raises(Race, match="sum"):
                values.add_(1)
            event = streams.event()
            event.record(other)
            event.synchronize()
            values.add_(1)


def test_what_one_stream_made_others_wait_for_once(fake_gpu, monkeypatch):
    """And no capture begins meanwhile."""
    streams, held, own = Streams(), [], stream_order.captures_on
    monkeypatch.setattr(
        stream_order, "captures_on", lambda there: held.append(stream_order.waiting.locked()) or own(there)
    )
    fake_gpu.has(streams=streams, numbered=streams, capturing=False)
    device, values = torch.device("cpu"), torch.zeros(2)
    assert stream_order.of(device) is None
    one, other = streams.new(), streams.new()
    with Watching(streams):
        with streams.on(one):
            values.add_(1)
            order = stream_order.StreamOrder(device)
        with streams.on(other):
            order.wait()
            values.mul_(2)
            order.queued()
            before = dict(other.seen)
            order.wait()
            assert other.seen == before
        with streams.on(one), pytest.raises(Race):
            values.sum()
        with streams.on(one):
            order.wait()
            values.sum()
    assert held == [True, True] and not stream_order.waiting.locked()


def test_copies_know_no_streams_of_other_processes(fake_gpu):
    fake_gpu.has(stream_number=1 << 40)
    order = stream_order.StreamOrder(torch.device("cuda", 0))
    fake_gpu.has(available=False)
    assert pickle.loads(pickle.dumps(order)) is None
    fake_gpu.has(available=True, stream_number=7)
    assert copy.deepcopy(order).waited == [7]


@pytest.fixture
def streams(kernel_lane, fake_gpu):
    if kernel_lane.device != "cpu":
        pytest.skip("a GPU has streams of its own")
    return replays_on_the_cpu(fake_gpu)


def two_streams(streams, fake_gpu, name, trains, mode="graphs"):
    """Scenes on two streams in turns, of one size and then of another."""
    shares = [0.3 + 0.002 * seed for seed in range(7)] + [0.55] * (0 if trains else 5)
    turns = itertools.cycle([streams.new(), streams.new()])
    with apis.standin(name) as module, watched(streams, fake_gpu):
        plain = apis.network(module, name, "cpu").train(trains)
        model, found = copy.deepcopy(plain), []
        for one in (streams.known[1], streams.known[2]):  # weights are from before
            one.wait_stream(streams.known[0])
        # A trial writes statistics back with the values that they had.
        streams.ignored |= {one.untyped_storage()._cdata for one in model.buffers()}
        for seed, share in enumerate(shares):
            with streams.on(next(turns)), settings.override(optimize=mode):
                x = apis.scene(module, name, seed, "cpu", share)
                found.append(results(model, x, trains))
                if trains:  # gradients are the program's own to order
                    streams.current().synchronize()
        for stream in streams.known:
            stream.synchronize()
        with settings.override(optimize="off", capture="off"):
            for seed, (share, mine) in enumerate(zip(shares, found, strict=True)):
                same(mine, results(plain, apis.scene(module, name, seed, "cpu", share), trains))
        return sum(one.hits for one in graph_regions.summary())


@pytest.mark.emulated
@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
def test_replays_on_two_streams(streams, fake_gpu, trains):
    own, held = captured_model.Captured.cutter, []

    def cutter(self, call, rows):
        cut = own(self, call, rows)

        def copied(tensor):
            held.extend(unit.replayer.lock._is_owned() for unit in graph_regions._regions.values())
            return cut(tensor)

        return copied

    fake_gpu.replaces(captured_model.Captured, cutter=cutter)
    assert two_streams(streams, fake_gpu, "torchsparse", trains) >= 2
    # A training step is its thread's own until its backward pass.
    assert held and (trains or all(held)), "another thread may replay before results are copied"


@pytest.mark.emulated
def test_replays_that_would_not_wait_are_noticed(streams, fake_gpu, monkeypatch):
    monkeypatch.setattr(GraphedModule, "wait_for_last_replay", lambda self: None)
    with pytest.raises(Race):
        two_streams(streams, fake_gpu, "spconv", False)


@pytest.mark.emulated
@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", apis.NAMES)
def test_memory_is_used_until_the_last_launch(streams, fake_gpu, name, trains):
    """torch waits for the stream that it was made on alone."""
    aside, late = streams.new(), []
    own = replay_training._Run.backward

    def look():
        modes = [unit.replayer.training if trains else unit.replayer for unit in graph_regions._regions.values()]
        seen = [mode.memory.stream.seen for mode in modes if mode.memory is not None]
        late.extend(aside.seen[aside.number] - one.get(aside.number, 0) for one in seen)

    def backward(run, *given):
        found = own(run, *given)
        look()
        return found

    fake_gpu.replaces(replay_training._Run, backward=backward)
    with apis.standin(name) as module, settings.override(optimize="graphs"):
        model = apis.network(module, name, "cpu").train(trains)
        with watched(streams, fake_gpu), streams.on(aside), torch.set_grad_enabled(trains):
            aside.wait_stream(streams.known[0])
            streams.ignored |= {one.untyped_storage()._cdata for one in model.buffers()}
            for seed in range(7):
                values = apis.values_of(model(apis.scene(module, name, seed, "cpu", 0.3 + 0.002 * seed)))
                look()
                if trains:
                    apis.loss_of(values).backward()
    assert len(late) > 3 * (1 + trains) and not any(late)


@pytest.mark.emulated
def test_maps_prefetched_on_two_streams(streams, fake_gpu):
    two_streams(streams, fake_gpu, "spconv", False, "off")
    assert prefetch.counts()["prefetched"] >= 6


@pytest.mark.emulated
@pytest.mark.parametrize("name", ["spconv", "minkowski"])
def test_one_input_on_two_streams(streams, fake_gpu, name):
    """The second stream finds the maps of the first, and waits for them."""
    one, other = streams.new(), streams.new()
    with apis.standin(name) as module, watched(streams, fake_gpu):
        model = apis.network(module, name, "cpu").eval()
        x = apis.scene(module, name, 0, "cpu", 0.3)
        for stream in (one, other):
            stream.wait_stream(streams.known[0])
        with settings.override(optimize="off", capture="off"):
            with streams.on(one):
                expected = results(model, x)
            assert one.number not in other.seen
            with streams.on(other):
                found = results(model, x)
            assert other.seen[one.number] > 0
            streams.known[0].wait_stream(other)
            same(found, expected)


@pytest.mark.emulated
def test_a_stream_is_captured_on_by_one_thread_at_a_time(streams):
    """torch may have given it to two of them."""
    aside, told = streams.new(), []

    def capture(name):
        with captured_maps.on_own_stream(torch.device("cpu"), aside):
            told.append(name)
            with captured_maps.on_own_stream(torch.device("cpu"), aside):  # its maps
                time.sleep(0.02)
            told.append(name)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(capture, range(4)))
    assert told == [name for one in dict.fromkeys(told) for name in (one, one)]


@pytest.mark.gpu
def test_captures_are_on_no_stream_of_the_program():
    """torch gives the same streams out again and again."""
    device = torch.device("cuda", torch.cuda.current_device())
    held = {torch.cuda.Stream(device).cuda_stream for _ in range(80)}
    assert 0 < len(held) < 80
    stream = GraphMemory(device).stream
    assert stream.cuda_stream not in held
    with captured_maps.on_own_stream(device, stream):
        assert torch.cuda.current_stream(device).cuda_stream not in held


@pytest.mark.gpu
@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("mode", ["off", "fuse", "graphs"])
@pytest.mark.parametrize("name", apis.NAMES)
class TestOnAGpu:
    """Streams that wait for nobody, each with work in front of it that takes the GPU a while."""

    def expected(self, module, name, plain, trains, seeds):
        with settings.override(optimize="off", capture="off"):
            found = [results(plain, apis.scene(module, name, seed, "cuda", 0.3), trains) for seed in seeds]
        torch.cuda.synchronize()
        return found

    @pytest.mark.parametrize("threads", [1, 2])
    def test_in_turns(self, name, mode, trains, threads):
        if trains and threads == 2:
            pytest.skip("two threads that train one model change one set of gradients")
        busy = torch.randn(2048, 2048, device="cuda")
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        seeds = list(range(24))
        with apis.standin(name) as module:
            plain = apis.network(module, name, "cuda").train(trains)
            model = copy.deepcopy(plain)
            expected = self.expected(module, name, plain, trains, seeds)

            def run(seed):
                with torch.cuda.stream(streams[seed % 2]), settings.override(optimize=mode):
                    for _ in range(8):
                        busy @ busy
                    x = apis.scene(module, name, seed, "cuda", 0.3)
                    found = results(model, x, trains)
                    if trains:  # gradients are the program's own to order
                        streams[(seed + 1) % 2].wait_stream(streams[seed % 2])
                    return found

            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                found = list((map if threads == 1 else pool.map)(run, seeds))
            torch.cuda.synchronize()
            assert mode != "graphs" or sum(one.hits for one in graph_regions.summary()) > 0
        for mine, theirs in zip(found, expected, strict=True):
            same(mine, theirs)

    def test_one_input_on_two_streams(self, name, mode, trains):
        busy = torch.randn(2048, 2048, device="cuda")
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        with apis.standin(name) as module:
            plain = apis.network(module, name, "cuda").train(trains)
            pair = [copy.deepcopy(plain) for _ in streams]
            for seed in range(8):
                (expected,) = self.expected(module, name, plain, trains, [seed])
                x, found = apis.scene(module, name, seed, "cuda", 0.3), []
                torch.cuda.synchronize()
                for stream, model in zip(streams, pair, strict=True):
                    with torch.cuda.stream(stream), settings.override(optimize=mode):
                        if stream is streams[0]:
                            for _ in range(8):
                                busy @ busy
                        found.append(results(model, x, trains))
                torch.cuda.synchronize()
                for mine in found:
                    same(mine, expected)
