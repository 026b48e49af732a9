"""Convolutions under a limit on memory: bits, what the error says, what is dropped; on every way a
layer can run."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading

import pytest
import torch

import sparse_bridge
from sparse_bridge import memory, settings
from sparse_bridge.core import functional
from sparse_bridge.core.conv import layers
from sparse_bridge.core.conv.deferred.conv import DeferredConv
from sparse_bridge.core.conv.epilogue import Epilogue, Norm
from sparse_bridge.core.conv.plan import ConvForm
from sparse_bridge.core.conv.row_blocks import job, kernel_job, product, torch_job
from sparse_bridge.core.device import memory_use
from sparse_bridge.core.maps import map_builder
from sparse_bridge.core.maps.map_cache import MapStore
from sparse_bridge.core.maps.request import MapRequest, request
from sparse_bridge.errors import MemoryLimitError, SettingError, UnsupportedError
from tests.clouds import cloud, features
from tests.conftest import EMULATED, INTERPRETED

SHAPE = (8, 8, 6) if INTERPRETED else (14, 13, 12) if EMULATED else (20, 18, 16)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
KINDS = ("submanifold", "strided", "inverse")
CHANNELS = 16, 24
# Building a map is estimated on a GPU, at more than narrow layers take: of layers there the result
# decides, so that the lowest limit is one of blocks.
WIDE = 256, 320
TRIES = 20  # of limits, each of which an error named


@pytest.fixture(autouse=True)
def tight(monkeypatch):
    """Blocks are allowed for less than a real scene has to offer, and nothing is held from before;
    returns (kind of job, rows of a block) of what computes in blocks."""
    memory_use.reset()
    monkeypatch.setattr(kernel_job, "SLACK", 0 if not torch.cuda.is_available() else job.SLACK)
    monkeypatch.setattr(product, "LEAST", 128)
    found = []
    for kind in (kernel_job.KernelJob, torch_job.TorchJob):

        def fill(self, y, height, filled=kind.fill):
            found.append((type(self).__name__, height))
            filled(self, y, height)

        monkeypatch.setattr(kind, "fill", fill)
    return found


class Scene:
    """A layer of one kind over a scene; maps come as adapters ask for them."""

    def __init__(self, kind, dtype, device, share=0.4, exact=False):
        self.kind, self.device = kind, torch.device(device)
        self.c_in, self.c_out = WIDE if self.device.type == "cuda" else CHANNELS
        self.coords = cloud(SHAPE, 2, share, 0).to(device)
        self.offsets = functional.kernel_offsets((3, 3, 3), padding=(1, 1, 1))
        weight = features(27 * self.c_in, self.c_out, 2).view(27, self.c_in, self.c_out)
        if exact:  # sums have no rounding to depend on
            weight = weight.mul(3).round()
        self.weight = weight.to(dtype).to(device)
        self.exact, self.dtype = exact, dtype

    def map(self):
        cmap = functional.coordinate_map(self.coords, SHAPE, 2)
        store = MapStore(cmap)
        if self.kind == "submanifold":
            return request(store, cmap, MapRequest("submanifold", self.offsets)).kmap
        half = [-(-extent // 2) for extent in SHAPE]
        small = functional.coordinate_map(cloud((2, 2, 2), 2, 1.0, 0), half)
        made = request(store, cmap, MapRequest("strided", self.offsets, (2, 2, 2), small.box))
        return made.kmap.transposed() if self.kind == "inverse" else made.kmap

    def operands(self, kmap):
        rows = features(kmap.n_in, self.c_in, 1)
        rows = rows.mul(3).round() if self.exact else rows
        return rows.to(self.dtype).to(self.device)

    def follows(self, kmap):
        """All that may follow the sums."""
        vectors = [(torch.arange(self.c_out) % 5 + k).float().to(self.device) for k in range(4)]
        norm = Norm(vectors[0], vectors[1].abs() + 1, *vectors[2:], 1e-3)
        residual = features(kmap.n_out, self.c_out, 3).to(self.dtype).to(self.device)
        return {"norm": norm, "residual": residual, "activation": "relu"}

    @torch.no_grad()
    def run(self, limit=None, kmap=None, whole=False, given=None):
        """The result, computed over a new map; whole: with all that may follow.  given: features,
        and what follows."""
        under = contextlib.nullcontext() if limit is None else sparse_bridge.memory_limit(limit)
        with under:
            kmap = self.map() if kmap is None else kmap
            x, follows = given or (self.operands(kmap), self.follows(kmap) if whole else {})
            return functional.conv(x, self.weight, None, kmap, **follows)

    def tightest(self, **more):
        """(the lowest limit, as errors tell it, the result under it): maps and products have to
        fit, one after another. One run gives both: another may meet an allocator in another
        state."""
        limit = 1
        for _ in range(TRIES):
            y, error = self.attempt(limit, **more)
            if error is None:
                return limit, y
            assert error.limit == limit < error.least <= error.asked
            limit = error.least
        raise AssertionError(f"{TRIES} limits that errors named did not do, up to {limit}")

    def least(self, **more):
        return self.tightest(**more)[0]

    def attempt(self, limit, **more):
        """(result, None) of a run under a limit, or (None, its error)."""
        self.settle()
        try:
            return self.run(limit, **more), None
        except MemoryLimitError as error:
            return None, error.with_traceback(None)  # whose frames hold tensors

    def refused(self, limit, **more):
        return self.attempt(limit, **more)[1]

    def settle(self):
        """Let go of what earlier runs left behind. An allocator counts tensors until cycles that
        hold them are collected, and may take a free block for a smaller tensor."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def scene_of(kind, dtype, lane, **more):
    """On interpreted kernels numpy's products round by a row's place."""
    return Scene(kind, dtype, lane.device, exact=bool(INTERPRETED), **more)


@pytest.mark.interpreted
@pytest.mark.emulated
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_have_the_bits_of_the_whole(kind, dtype, map_lane, tight):
    if INTERPRETED and (dtype == torch.bfloat16 or (kind, dtype) == ("inverse", torch.float16)):
        pytest.skip("the others are enough where kernels take seconds")
    scene = scene_of(kind, dtype, map_lane)
    want = scene.run()
    y = scene.tightest()[1]
    assert torch.equal(y, want)
    assert tight and (tight[0][1] < len(want) or INTERPRETED)


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_what_follows_the_sums(kind, dtype, map_lane, tight):
    scene = scene_of(kind, dtype, map_lane)
    want = scene.run(whole=True)
    y = scene.tightest(whole=True)[1]
    assert torch.equal(y, want) and tight


@pytest.mark.emulated
@pytest.mark.parametrize("kind", KINDS)
def test_the_least_is_true(kind, map_lane):
    scene = scene_of(kind, torch.float32, map_lane)
    limit = scene.least()
    assert scene.refused(limit) is None
    error = scene.refused(limit - 1)
    assert error is not None and error.least == limit
    for part in (f"{limit} bytes or more", f"{limit - 1} bytes)", "smaller batches"):
        assert part in str(error)


def most_allocated(run):
    """The most bytes that torch held on the CPU of what it allocated in `run()`."""
    gc.collect()
    kind = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind], profile_memory=True) as found:
        run()
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))


@pytest.mark.emulated
@pytest.mark.parametrize("whole", (False, True))
@pytest.mark.parametrize("kind", KINDS)
def test_the_arithmetic_holds_what_torch_allocates(kind, whole, map_lane):
    if map_lane.device != "cpu":
        pytest.skip("there the allocator counts itself")
    scene = scene_of(kind, torch.float16, map_lane)
    kmap = scene.map()
    x, follows = scene.operands(kmap), scene.follows(kmap) if whole else {}
    limit = scene.least(kmap=kmap, given=(x, follows))
    y = scene.run(limit, kmap, given=(x, follows))
    before = [x.nbytes, scene.weight.nbytes, kmap.rulebook.nbytes, whole and y.nbytes]
    most = most_allocated(lambda: scene.run(limit, kmap, given=(x, follows)))
    assert most >= y.nbytes, "the measure sees too little"
    assert sum(before) + most <= limit


@pytest.mark.parametrize("flow", ("explicit", "per_offset"))
def test_any_room_between_the_least_and_the_whole_is_used(flow, tight):
    with settings.override(dataflow=flow):
        scene = Scene("submanifold", torch.float32, "cpu")
        want, least = scene.run(), scene.least()
        asked = scene.refused(least - 1).asked
        for limit in range(least, asked + 1, max(1, (asked - least) // 6)):
            assert torch.equal(scene.run(limit), want)
        heights = {height for _, height in tight}
        assert len(heights) > 2 if flow == "per_offset" else not heights
        tight.clear()
        scene.run(asked)
        assert not tight


@pytest.mark.interpreted
@pytest.mark.emulated
def test_a_kernel_without_a_table(kernel_lane, tight):
    """What takes least: neighbours are looked up block by block, and no map stays."""
    scene = scene_of("submanifold", torch.float32, kernel_lane)
    want, limit = scene.run(), scene.least()
    with sparse_bridge.memory_limit(limit):
        kmap = scene.map()
        tight.clear()
        y, error = scene.attempt(limit, kmap=kmap)
        assert error is None and torch.equal(y, want)
        assert {kind for kind, _ in tight} == {"SearchJob"}
        assert kmap.rulebook.nbytes == 0
    assert torch.equal(scene.run(kmap=kmap), want)
    assert kmap.rulebook.nbytes > 0


def test_maps_are_dropped_and_built_again(monkeypatch):
    scene, builds = Scene("submanifold", torch.float32, "cpu"), []
    build = map_builder.submanifold
    monkeypatch.setattr(map_builder, "submanifold", lambda *given: builds.append(1) or build(*given))
    with sparse_bridge.memory_limit("1GiB"):
        first, second = scene.map(), scene.map()
        want = scene.run("1GiB", first)
        assert torch.equal(scene.run("1GiB", second), want)
        x = scene.operands(first)
        result = want.nbytes
        need = memory_use.in_use(x.device, x, scene.weight) - first.rulebook.nbytes + result
    limit = need + second.rulebook.nbytes // 2  # room for the second map alone
    assert len(builds) == 2
    assert torch.equal(scene.run(limit, second), want)
    assert first.rulebook.nbytes == 0 < second.rulebook.nbytes and len(builds) == 2
    assert torch.equal(scene.run(limit, first), want)
    assert second.rulebook.nbytes == 0 < first.rulebook.nbytes and len(builds) == 3


def test_of_a_map_that_nobody_can_build_again_one_view_stays():
    scene = Scene("submanifold", torch.float32, "cpu")
    kmap = scene.map()  # before the limit
    with settings.override(dataflow="explicit"):
        scene.run(kmap=kmap)
    before = kmap.rulebook.nbytes
    want = scene.run(kmap=kmap)
    kmap.rulebook.drop()
    assert 0 < kmap.rulebook.nbytes < before
    assert torch.equal(scene.run(kmap=kmap), want)


def test_kernel_volume_one():
    from sparse_bridge.core.ops import pointwise

    x, weight = features(500, 8), features(8, 6, 1)
    with torch.no_grad():
        want, size = pointwise.linear(x, weight), x.nbytes + weight.nbytes + 500 * 6 * 4
        with sparse_bridge.memory_limit(size):
            assert torch.equal(pointwise.linear(x, weight), want)
        with sparse_bridge.memory_limit(size - 1), pytest.raises(MemoryLimitError) as refused:
            pointwise.linear(x, weight)
    assert refused.value.least == refused.value.asked == size


def test_gradients_are_refused():
    scene = Scene("submanifold", torch.float32, "cpu")
    kmap = scene.map()
    x = scene.operands(kmap).requires_grad_()
    with sparse_bridge.memory_limit("1GiB"):
        with pytest.raises(UnsupportedError, match=r"no_grad.*sparse_bridge.checkpoint"):
            functional.conv(x, scene.weight, None, kmap)
        with torch.no_grad():
            functional.conv(x, scene.weight, None, kmap)
    functional.conv(x, scene.weight, None, kmap).sum().backward()
    assert x.grad is not None


@torch.no_grad()
def test_copies_for_autocast_are_counted():
    scene = Scene("submanifold", torch.float32, "cpu")
    kmap = scene.map()
    x = scene.operands(kmap)
    refused = pytest.raises(MemoryLimitError, match=r"in autocast's torch\.bfloat16")
    with torch.autocast("cpu", torch.bfloat16), sparse_bridge.memory_limit(x.nbytes), refused:
        functional.conv(x, scene.weight, None, kmap)


# the limit itself


@pytest.mark.parametrize(
    ("given", "size"),
    [("8GiB", 8 << 30), ("512MB", 512 * 10**6), ("1.5 kib", 1536), (" 7 ", 7), (9, 9), ("2b", 2), ("1TB", 10**12)],
)
def test_sizes(given, size):
    assert sparse_bridge.memory_limit(given).limit == size


@pytest.mark.parametrize("given", ["", "many", "-1GiB", 0, -5, "0MB", "3 furlongs", None, 2.5, True])
def test_no_sizes(given):
    with pytest.raises(SettingError, match=r"expected a size such as '8GiB'"):
        sparse_bridge.memory_limit(given)


def test_the_lowest_is_in_force():
    assert memory.limit is None
    outer, inner = sparse_bridge.memory_limit(100), sparse_bridge.memory_limit(200)
    with outer:
        assert memory.limit == 100
        with inner:
            assert memory.limit == 100
            with sparse_bridge.memory_limit(50):
                assert memory.limit == 50
            assert memory.limit == 100
    assert memory.limit is None
    inner.__enter__()
    outer.__enter__()
    inner.__exit__(None, None, None)  # in any order
    assert memory.limit == 100
    outer.__exit__(None, None, None)
    assert memory.limit is None
    with pytest.raises(sparse_bridge.errors.LifecycleError, match="not open"):
        outer.__exit__(None, None, None)


def test_an_exception_closes_it():
    with pytest.raises(ZeroDivisionError), sparse_bridge.memory_limit(5):
        _ = 1 / 0
    assert memory.limit is None


def test_what_was_decided_before_holds_behind():
    """A limit around each call costs no plan that was made without it, or by an earlier limit."""
    before = settings.generation
    with sparse_bridge.memory_limit("1GiB"):
        inside = settings.generation
    assert settings.generation == before != inside
    with sparse_bridge.memory_limit("1GiB"):
        assert settings.generation == inside
        with settings.override(optimize="off"):
            changed = settings.generation
    assert len({before, inside, changed, settings.generation}) == 4
    with sparse_bridge.memory_limit("2GiB"):
        assert settings.generation not in (before, inside, changed)


def test_nothing_is_deferred():
    """Trials of what follows a layer hold its result twice."""
    scene = Scene("submanifold", torch.float32, "cpu", share=0.9)
    kmap = scene.map()
    x, form, bias = scene.operands(kmap), ConvForm(), Epilogue()
    x = x.repeat(1, 4)
    weight = features(27 * 64, 64, 5).view(27, 64, 64)
    with torch.no_grad():
        deferred = layers.convolve_layer(weight, x, weight, kmap, bias, form)
        assert isinstance(deferred, DeferredConv)
        with sparse_bridge.memory_limit("1GiB"):
            y = layers.convolve_layer(weight, x, weight, kmap, bias, form)
            assert type(y) is torch.Tensor
        assert torch.equal(deferred.materialize(), y)


def test_threads():
    """The process has one limit, whoever opens it."""
    scene, answers = Scene("submanifold", torch.float32, "cpu"), []
    want, barrier = scene.run(), threading.Barrier(3)

    def work(size):
        limit = sparse_bridge.memory_limit(size)
        barrier.wait()
        for _ in range(5):
            with limit:
                assert memory.limit <= limit.limit
                answers.append(torch.equal(scene.run(), want))

    threads = [threading.Thread(target=work, args=(f"{n}GiB",)) for n in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert memory.limit is None and answers == [True] * 15


def test_maps_that_are_gone_are_not_counted():
    scene = Scene("submanifold", torch.float32, "cpu")
    with sparse_bridge.memory_limit("1GiB"):
        kmap = scene.map()
        scene.run(kmap=kmap)
        assert memory_use.in_use(torch.device("cpu")) == kmap.rulebook.nbytes > 0
        del kmap
        gc.collect()
        assert memory_use.in_use(torch.device("cpu")) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", (torch.float16, torch.float32), ids=str)
def test_the_peak_on_a_gpu(kind, dtype):
    """What torch's allocator saw stays under the limit, also where blocks are forced, by the whole
    as well as by parts."""
    n = 60_000
    coords = torch.randint(0, 128, (n, 4), dtype=torch.int32)
    coords[:, 0] = 0
    coords = coords.unique(dim=0).cuda()
    offsets = functional.kernel_offsets((3, 3, 3), padding=(1, 1, 1))
    weight = torch.randn(27, 128, 128, device="cuda").to(dtype) / 40
    box = functional.coordinate_map(coords // 2, (64,) * 3, 1).box

    @torch.no_grad()
    def run():
        cmap = functional.coordinate_map(coords, (128,) * 3, 1)
        store = MapStore(cmap)
        if kind == "submanifold":
            kmap = request(store, cmap, MapRequest("submanifold", offsets)).kmap
        else:
            kmap = request(store, cmap, MapRequest("strided", offsets, (2, 2, 2), box)).kmap
            kmap = kmap.transposed() if kind == "inverse" else kmap
        torch.manual_seed(0)
        x = torch.randn(kmap.n_in, 128, device="cuda", dtype=dtype)
        return functional.conv(x, weight, None, kmap)

    want = run()  # and compiles
    limit = 1
    while True:
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        try:
            with sparse_bridge.memory_limit(limit):
                y = run()
        except MemoryLimitError as error:
            assert error.least > limit
            limit = error.least
            continue
        break
    assert torch.equal(y, want)
    assert torch.cuda.max_memory_allocated() <= limit
    with pytest.raises(MemoryLimitError):
        del y
        gc.collect()
        with sparse_bridge.memory_limit(limit - (1 << 20)):
            run()
