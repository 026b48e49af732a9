"""What operations between the bridge's layers take above a limit on memory: which layer, or which
end of a block, says so. The allocator's statistics are invented; on a GPU they are real."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

import sparse_bridge
from sparse_bridge import memory
from sparse_bridge.core import functional
from sparse_bridge.core.device import memory_use
from sparse_bridge.core.ops import pointwise
from sparse_bridge.errors import MemoryLimitError
from tests.clouds import cloud, features

GIB = 1 << 30


class Statistics:
    """What torch's allocator says of two GPUs; no process has that many here by itself."""

    def __init__(self, monkeypatch, initialized=True):
        self.now, self.peaks, self.initialized = [0, 0], [0, 0], initialized
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self.initialized)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(self.peaks))
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", self.of)

    def of(self, gpu):
        assert self.initialized, "asking would make a context"
        gpu = getattr(gpu, "index", gpu)
        return {"allocated_bytes": {"all": {"current": self.now[gpu], "peak": self.peaks[gpu]}}}

    def reach(self, size, gpu=0):
        """Operations between layers have so many bytes in use, and free them."""
        self.peaks[gpu] = max(self.peaks[gpu], size)

    def reset(self, gpu=0):
        self.peaks[gpu] = self.now[gpu]


@pytest.fixture
def statistics(monkeypatch):
    return Statistics(monkeypatch)


def layer(gpu=0):
    """What every layer of the bridge asks first, on a GPU."""
    memory_use.need(torch.device("cuda", gpu), 1 << 20, "a layer")


def excess_of(limit, work):
    """The error with which a block under a limit ends, if any."""
    try:
        with sparse_bridge.memory_limit(limit):
            work()
    except MemoryLimitError as error:
        return error
    finally:
        assert memory.limit is None
    return None


def test_the_next_layer_says_what_came_above_the_limit(statistics):
    ran = []

    def work():
        layer()
        statistics.reach(3 * GIB)
        ran.append("other")
        layer()
        ran.append("layer")

    error = excess_of("2GiB", work)
    assert ran == ["other"]
    assert (error.limit, error.asked, error.least) == (2 * GIB, 3 * GIB, 3 * GIB)
    for part in ("2.00 GiB", "cuda:0 was 3.00 GiB", "an MLP", "rows in parts", f"{3 * GIB} bytes", "checkpoint("):
        assert part in str(error)
    statistics.reset()
    assert excess_of(error.least, work) is None, "what it says would have done"


def test_the_block_says_what_no_layer_did(statistics):
    error = excess_of("2GiB", lambda: statistics.reach(3 * GIB, gpu=1))
    assert error.least == 3 * GIB and "cuda:1" in str(error)


def test_a_layer_looks_at_its_own_gpu(statistics):
    def work():
        statistics.reach(3 * GIB, gpu=1)
        layer(gpu=0)
        with pytest.raises(MemoryLimitError, match="cuda:1"):
            layer(gpu=1)

    assert excess_of("2GiB", work) is None


def test_one_excess_is_one_error(statistics):
    """The statistics stay where they are: who catches the error goes on until there is more."""

    def work():
        for size in (2 * GIB, 3 * GIB):
            statistics.reach(size)
            with pytest.raises(MemoryLimitError) as caught:
                layer()
            assert caught.value.least == size
            layer()
        statistics.reset()
        layer()
        statistics.reach(3 * GIB)  # as high as before, and new
        with pytest.raises(MemoryLimitError):
            layer()

    assert excess_of("1GiB", work) is None


def test_other_exceptions_take_a_note_of_it(statistics):
    with pytest.raises(ZeroDivisionError) as caught, sparse_bridge.memory_limit("1GiB"):
        statistics.reach(2 * GIB)
        _ = 1 / 0
    assert memory.limit is None
    if hasattr(caught.value, "add_note"):
        (note,) = caught.value.__notes__
        assert f"{2 * GIB} bytes or more" in note
    with pytest.raises(ZeroDivisionError) as caught, sparse_bridge.memory_limit("1GiB"):
        _ = 1 / 0
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (0, GIB, False),
        (0, GIB + (1 << 20), False),  # blocks of the allocator are as large as that
        (0, 2 * GIB, True),
        (2 * GIB, 2 * GIB, False),  # of before: what happened meanwhile is not known
        (2 * GIB, 3 * GIB, True),
        (3 * GIB, 2 * GIB, True),  # the program reset them meanwhile
        (3 * GIB, GIB, False),
    ],
)
@pytest.mark.parametrize("asks", (layer, lambda: None))
def test_which_peaks_are_of_the_block(asks, before, after, said, statistics):
    statistics.peaks[0] = before

    def work():
        statistics.peaks[0] = after
        asks()

    assert (excess_of("1GiB", work) is not None) == said


@pytest.mark.parametrize("asks", (layer, lambda: None))
def test_peaks_count_against_the_limit_of_their_time(asks, statistics):
    """Limits that open and close are moments at which peaks are read."""

    def inner():
        statistics.reach(2 * GIB)
        with pytest.raises(MemoryLimitError) as caught, sparse_bridge.memory_limit("1GiB"):
            statistics.reach(3 * GIB)
        assert caught.value.limit == GIB and memory.limit == 3 * GIB
        layer()

    assert excess_of("3GiB", inner) is None

    def before_inner():
        statistics.reach(4 * GIB)
        with sparse_bridge.memory_limit("1GiB"):
            asks()

    assert excess_of("3GiB", before_inner).limit == 3 * GIB

    def behind_inner():
        with sparse_bridge.memory_limit("1GiB"):
            asks()
        statistics.reach(5 * GIB)
        asks()

    assert excess_of("3GiB", behind_inner).limit == 3 * GIB


def test_threads_share_an_excess(statistics):
    """One of them says it."""
    errors, barrier = [], threading.Barrier(3)

    def work():
        barrier.wait()
        try:
            for _ in range(50):
                layer()
        except MemoryLimitError as error:
            errors.append(error)

    def run():
        statistics.reach(2 * GIB)
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert excess_of("1GiB", run) is None and len(errors) == 1


def test_no_context_is_made(monkeypatch):
    statistics = Statistics(monkeypatch, initialized=False)
    assert excess_of("1GiB", lambda: None) is None

    def first_use():
        statistics.initialized = True
        statistics.reach(2 * GIB)

    assert excess_of("1GiB", first_use).least == 2 * GIB


def test_nothing_is_read_without_a_limit(monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", None)
    layer()


@torch.no_grad()
@pytest.mark.parametrize("c_out", (1, 24))
@pytest.mark.parametrize("kind", ("map", "pointwise"))
def test_products_ask_before_they_begin(c_out, kind, monkeypatch):
    asked = []

    def limit_on(device):
        asked.append(device)
        raise MemoryLimitError("it was exceeded")

    coords = cloud((8, 8, 6), 2, 0.4)
    kmap = functional.submanifold(
        functional.coordinate_map(coords, (8, 8, 6), 2), functional.kernel_offsets((3, 3, 3), padding=(1, 1, 1))
    )
    x, weight = features(len(coords), 16), features(27 * 16, c_out, 2).view(27, 16, c_out)
    monkeypatch.setattr(memory_use, "limit_on", limit_on)
    with sparse_bridge.memory_limit("1GiB"), pytest.raises(MemoryLimitError, match="it was exceeded"):
        functional.conv(x, weight, None, kmap) if kind == "map" else pointwise.linear(x, weight[0])
    assert asked == [torch.device("cpu")]


@pytest.mark.gpu
def test_an_mlp_on_a_gpu():
    """The limit that the error names does, and blocks or not, bits are the same."""
    coords = torch.randint(0, 96, (30_000, 4), dtype=torch.int32)
    coords[:, 0] = 0
    coords = coords.unique(dim=0).cuda()
    offsets = functional.kernel_offsets((3, 3, 3), padding=(1, 1, 1))
    weight = torch.randn(27, 128, 128, device="cuda") / 40
    mlp = torch.nn.Sequential(torch.nn.Linear(128, 1024), torch.nn.SiLU(), torch.nn.Linear(1024, 128)).cuda()
    x = torch.randn(len(coords), 128, device="cuda")
    ran = []

    @torch.no_grad()
    def run():
        ran.clear()
        kmap = functional.submanifold(functional.coordinate_map(coords, (96,) * 3, 1), offsets)
        y = functional.conv(x, weight, None, kmap)
        y = mlp(y)
        ran.append("mlp")
        y = functional.conv(y, weight, None, kmap)
        ran.append("layer")
        return y

    def attempt(limit):
        """(result, None), or (None, the error)."""
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        try:
            with sparse_bridge.memory_limit(limit):
                return run(), None
        except MemoryLimitError as error:
            return None, error.with_traceback(None)  # whose frames hold tensors

    want = run()  # and compiles
    hidden = len(coords) * 1024 * 4
    limit = torch.cuda.memory_allocated() + hidden  # of two such tensors at once
    error = attempt(limit)[1]
    assert ran == ["mlp"]
    assert error.least == error.asked == torch.cuda.max_memory_allocated() > limit + hidden // 2
    y, again = attempt(error.least)
    assert again is None and torch.equal(y, want)
