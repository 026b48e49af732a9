"""Lanes: the same tests on every way a layer can run here.

A test that takes the `lane` fixture runs once per lane. Kernels on CPU tensors need a process of
their own (Triton picks its interpreter at import; the emulator is a driver), so those lanes are
chosen by environment variables and started by `tests/lanes`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.util
import os
import signal
import types

import hypothesis
import pytest

from sparse_bridge import settings, workers
from sparse_bridge.refusals import Why

workers.wait_passively()  # tests run beside one another
# A run in the background of a script has none of Ctrl-C, and neither would the programs it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples on every run: what a test says depends on the code alone, and not on the clock
# of a busy machine. New ones: `pytest --hypothesis-profile=new`. (The lane fixtures set nothing
# that one example could leave behind for the next.)
_checks = hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture
timeless = hypothesis.settings(deadline=None, suppress_health_check=_checks)
hypothesis.settings.register_profile("new", timeless)
hypothesis.settings.register_profile("repeatable", timeless, derandomize=True, database=None)
hypothesis.settings.load_profile("repeatable")

import torch  # noqa: E402

from tests import quick  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNEL_FLOWS = ("masked", "unmasked", "grouped")
EMULATED = os.environ.get("SPARSE_BRIDGE_TEST_ARCH", "")


@dataclasses.dataclass(frozen=True)
class Lane:
    """device of the tensors, dataflow forced there, GPU architecture that is emulated."""

    device: str
    dataflow: str
    arch: str = ""

    @property
    def kernels(self) -> bool:
        """Whether Triton kernels do the work."""
        return settings.DATAFLOWS[self.dataflow].kernels

    def serving(self, dtype):
        """The lane's dataflow, or the automatic one for a dtype that its kernels do not multiply:
        forced kernels would refuse."""
        from sparse_bridge.kernels.runtime import target as targets

        missing = dtype == torch.float64 or (
            dtype == torch.bfloat16 and self.kernels and not targets.of(torch.device(self.device)).has_bf16
        )
        if self.kernels and missing:
            return settings.override(dataflow="auto")
        return contextlib.nullcontext()

    @property
    def slow(self) -> bool:
        """Whether a kernel launch costs milliseconds."""
        return INTERPRETED or bool(self.arch)


def _lanes() -> list:
    if EMULATED:
        return [pytest.param(Lane("cpu", flow, EMULATED), id=f"{EMULATED}-{flow}") for flow in KERNEL_FLOWS]
    if INTERPRETED:
        return [pytest.param(Lane("cpu", flow), id=f"interpreter-{flow}") for flow in KERNEL_FLOWS]
    lanes = [pytest.param(Lane("cpu", flow), id=f"cpu-{flow}") for flow in ("per_offset", "explicit")]
    for flow in (*KERNEL_FLOWS, "per_offset"):
        lanes.append(pytest.param(Lane("cuda", flow), id=f"cuda-{flow}", marks=pytest.mark.gpu))
    return lanes


def _only(wanted) -> list:
    return [one for one in _lanes() if wanted(one.values[0])]


def _common(lane: Lane) -> bool:
    """On a real GPU compiling takes the time, so most tests run one dataflow there."""
    return lane.device == "cpu" or lane.dataflow == "masked"


def _one_per_device(lane: Lane) -> bool:
    torch_alone = lane.device == "cpu" and not lane.slow
    return lane.dataflow == ("per_offset" if torch_alone else "masked")


@contextlib.contextmanager
def _in_force(chosen: Lane):
    # A GPU takes the masked dataflow by itself; forcing it would bind CPU references too.
    own_choice = chosen.device == "cuda" and chosen.dataflow == "masked"
    with contextlib.ExitStack() as stack:
        stack.enter_context(settings.override(dataflow="auto" if own_choice else chosen.dataflow))
        if chosen.arch:
            import amd_emulator

            stack.enter_context(amd_emulator.patch_triton(chosen.arch))
        yield chosen


@pytest.fixture(params=_only(_common))
def lane(request):
    """The lane in force: its dataflow is set, its architecture's driver (if any) active."""
    with _in_force(request.param) as chosen:
        yield chosen


@pytest.fixture(params=_lanes())
def any_lane(request):
    """`lane`, and every other dataflow on a GPU."""
    with _in_force(request.param) as chosen:
        yield chosen


@pytest.fixture(params=_only(_one_per_device))
def map_lane(request):
    """One lane per device, for what does not depend on the dataflow: maps and pools."""
    with _in_force(request.param) as chosen:
        yield chosen


@pytest.fixture(params=_only(lambda lane: lane.dataflow == "masked"))
def kernel_lane(request):
    """One lane per device on which kernels run, for tests that launch them directly."""
    with _in_force(request.param) as chosen:
        yield chosen


@pytest.fixture
def built(monkeypatch):
    """Kinds of the maps that are built one by one."""
    from sparse_bridge.core.maps import request

    kinds, own = [], request.build

    def build(cmap, req):
        kinds.append(req.map_type)
        return own(cmap, req)

    monkeypatch.setattr(request, "build", build)
    return kinds


@pytest.fixture
def fake_gpu():
    """A GPU that is not there: `fake_gpu.has(...)` states facts about it, see `tests.fake_gpu`."""
    from tests.fake_gpu import FakeGpu

    gpu = FakeGpu()
    yield gpu
    gpu.gone()


@pytest.fixture
def calls_of():
    """`calls_of(owner, name)` is a list that grows with every call of that function."""
    from tests.calls import noted

    with contextlib.ExitStack() as stack:
        yield lambda owner, name: stack.enter_context(noted(owner, name))


@pytest.fixture
def rules():
    """Rules of size for one test: `rules.hold(layers_deferred())`, `rules.set(module, NAME=value)`."""
    from tests.rules import Rules

    held = Rules()
    yield held
    held.over()


@pytest.fixture
def plain_settings():
    """No setting of the caller's environment, and none left behind."""
    with settings.override():
        settings.reset(settings.Settings())
        yield


@pytest.fixture
def one_thread():
    """The wheel's own CPU convolutions race with more than one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")


# What a test module imports that waits for other threads or processes, or reads the clock.
_CLOCKS = {"concurrent", "multiprocessing", "signal", "threading", "time"}


def keeps_time(module) -> bool:
    """Whether what a test module says may depend on what else the machine does."""
    for value in vars(module).values():
        home = getattr(value, "__name__" if isinstance(value, types.ModuleType) else "__module__", "")
        if str(home).partition(".")[0] in _CLOCKS:
            return True
    return False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """GPU tests need a GPU, slow ones a word; lanes of special processes run what fits them."""
    if not torch.cuda.is_available() and "gpu" not in (config.option.markexpr or ""):
        without = [item for item in items if "gpu" in item.keywords]
        config.hook.pytest_deselected(items=without)  # thousands: at once, not one by one
        items[:] = [item for item in items if "gpu" not in item.keywords]
    timed = {module for module in {item.module for item in items} if keeps_time(module)}
    for item in items:
        if item.module in timed:
            item.add_marker(pytest.mark.timed)
    if not (INTERPRETED or EMULATED):
        quick.mark_beyond_samples(items)
    here = "interpreted" if INTERPRETED else "emulated" if EMULATED else None
    no_gpu = pytest.mark.skip(reason="needs a GPU")
    wrong_lane = pytest.mark.skip(reason="runs in a lane of its own")
    slow = pytest.mark.skip(reason="slow: run with --slow or -m slow")
    slow_wanted = config.getoption("--slow") or "slow" in (config.option.markexpr or "")
    for item in items:
        if "slow" in item.keywords and not slow_wanted:
            item.add_marker(slow)
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if here and here not in item.keywords:
            item.add_marker(wrong_lane)


_MANY = 50_000  # objects that a full collection looks at in some milliseconds


@pytest.fixture(autouse=True, scope="module")
def short_collections():
    """Most of what is alive before a module came with imports and compilers, and stays: the
    collections of its tests do not look at it again."""
    if len(gc.get_objects(generation=2)) > _MANY:
        gc.collect()
        gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # for modules that say at the end what leaks


# `torch.device` as a context knows torch's factories as they are at its first use in a process:
# that must not be while `poison` has others in their place.
with torch.device("cpu"):
    torch.empty(0)


@pytest.fixture
def errors_survived():
    """What a capture raises is passed over, as it is for users."""


@pytest.fixture(autouse=True)
def own_errors_raise(request, monkeypatch):
    """What a capture raises ends the test. For users the model runs without it: a test would pass over
    eager calls."""
    if "errors_survived" in request.fixturenames:
        return
    if importlib.util.find_spec("sparse_bridge.core.capture") is None:  # the engine goes without
        return
    found = importlib.import_module("sparse_bridge.core.capture.graphed_module").GraphedModule
    monkeypatch.setattr(found, "failed", _unless_an_error(found.failed))


def _unless_an_error(failed):
    def call(self, refusal):
        if getattr(refusal, "why", Why.GRAPH_ERROR) is Why.GRAPH_ERROR:
            raise AssertionError(f"a capture failed: {refusal}")
        failed(self, refusal)

    return call


@pytest.fixture(autouse=True)
def poison(monkeypatch, request):
    """Fresh memory holds NaN (integers: 113), so that one element left unwritten is seen."""
    if "core" not in request.path.parts and "kernels" not in request.path.parts:
        yield
        return

    def spoiled(make):
        def wrapper(*args, **kwargs):
            tensor = make(*args, **kwargs)
            if tensor.device.type != "meta":
                with torch.no_grad():
                    tensor.fill_(
                        float("nan") if tensor.is_floating_point() else 1 if tensor.dtype == torch.bool else 113
                    )
            return tensor

        return wrapper

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, spoiled(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", spoiled(torch.Tensor.new_empty))
    yield
