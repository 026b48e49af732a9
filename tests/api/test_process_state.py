"""What the process remembers has owners that forget it, and tests leave its private names alone."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

import sparse_bridge
from sparse_bridge import state
from sparse_bridge.core.conv import plan
from sparse_bridge.core.device import self_check
from tests.patience import PATIENCE

from .process_state import forgotten, kept, touched, trees

PACKAGE = pathlib.Path(sparse_bridge.__file__).parent
TESTS = pathlib.Path(__file__).parent.parent

# State that `state.reset` leaves alone, by reason.
CHOSEN = """
    hooks._eager_modules
    adapters.enabling.child_counts._folder adapters.enabling.inherited._counts
    adapters.enabling.inherited._describe adapters.enabling.limiting._limits
    adapters.flex_gemm.ADAPTER adapters.flex_gemm.profile._chosen adapters.flex_gemm.profile._reason
    adapters.flex_gemm.upstream.autotuner._begun adapters.flex_gemm.upstream.autotuner._cache
    adapters.call_stats._strict adapters.lifecycle._active
    adapters.lifecycle._left_out adapters.minkowski.profile._chosen
    adapters.minkowski.profile._reason adapters.minkowski.profile._settled
    adapters.optimizing._previous adapters.optimizing._chosen adapters.torchsparse.profile._chosen
    adapters.torchsparse.profile._reason adapters.torchsparse.profile.settled
    core.served_forward._classes core.conv.override._modules optimization._models settings._current
"""
BLOCKS = """
    core.device.selection._stand_in
    core.closed_world.watch._watched hooks._local
    adapters.call_stats._listeners core.capture.calls.exact_operators._local core.capture.padded._local
    core.capture.graph_capture._captures
    core.capture.graph_capture._graphs_on core.capture.graph_capture._with_workspaces
    core.capture.graph_capture._local core.capture.graph_regions._local
    core.conv.override._local core.conv.override._traced core.conv.override.inside
    core.conv.registry._automatic core.device.trace._local core.device.trace.recorders
    core.device.stream_order._users
    core.maps.request._local core.maps.rows._active core.maps.rows._local core.prefetch.prefetch._local
    core.tuning.tuner._tuner
    kernels.runtime.compile_processes._local
    kernels.runtime.precompile._local kernels.runtime.precompile.dry_runs
    kernels.runtime.uploads._later memory._excess memory._open memory._peaks memory.limit
    refusals._trial settings._besides
"""
REGISTERED = """
    adapters.enabling.compiling._undo adapters.enabling.compiling._users
    names._frameworks export.player.stand_in._listeners
    adapters.base.ADAPTERS adapters.base._loaded adapters.lifecycle._finders
    core.capture.graph_regions._layers_of core.capture.graph_regions._tensors_of core.compile.coordinates._builders
    core.compile.library.operator_names core.conv.kernel_products._listeners core.maps.request._listener
    core.maps.request._provider
    core.warmup.preload._begun core.warmup.preload._thread kernels.runtime.launch.REGISTRY
    native._listeners state._owners
"""
HELD_ELSEWHERE = """
    adapters.spconv.maps._stores
    core.compile.handles._memories core.geometry.boxes._bounded core.geometry.boxes._unbounded
    core.geometry.constants._constants core.ops.pointwise._captured
"""
NUMBERS = """
    adapters.minkowski.geometry.Region._interned core.compile.handles._numbers
    core.conv.dataflow._keys core.geometry.offsets.Offsets._interned
    kernels.runtime.launch._next kernels.runtime.launch._numbers settings._counted
    settings._generations settings.generation
"""
FACTS = """
    adapters.flex_gemm.v2.steps._known export.player.library.library
    adapters.spconv.keys._generation adapters.spconv.keys._shared core.compile.inductor._version
    core.conv.kernel_products._gather_gemm
    core.conv.kernel_products._narrow_gemm core.ops.batch_norm.passes
    core.device.workspace.keep_heap core.tuning.kernel_hash.code_hash
    core.tuning.kernel_hash.kernel_hash export.evaluation._operators native._module native._reason
    native._thread native._until native.calls.helper settings._told tools.api_coverage.table.releases
"""
EXCEPTIONS = {
    "what the program chose, which another call of its own takes back": CHOSEN,
    "what a `with` block, or one call, puts in place and takes away": BLOCKS,
    "what imports and `enable` register, once": REGISTERED,
    "what lives as long as a tensor, a model or a graph that reads it": HELD_ELSEWHERE,
    "numbers and objects that must never mean something else": NUMBERS,
    "facts of the installation, of the settings in force or of the whole process": FACTS,
}

# Private names that tests touch, by reason.
TOUCHED = {
    "invented frameworks must not be known to other tests": ("adapters.base._loaded adapters.lifecycle._left_out"),
    "a fork while another thread holds them is what is tested": ("adapters.call_stats._lock adapters.lifecycle._lock"),
    "whether anybody still listens is to be seen nowhere else": "adapters.call_stats._listeners",
    "without a GPU its graphs, random numbers and flags are imitated": (
        "core.capture.captured_maps._own_generator core.prefetch.prefetch._target "
        "core.capture.replay_training._Run "
        "core.capture.graph_regions._provide"
    ),
    "what is said once in a process is to be heard": "settings._told",
    "a preload that takes long is imitated": "core.warmup.preload._thread",
    "row numbers are to be made anew": "core.ops.pointwise._rows",
    "a helper that is compiled anew, or not at all, must not be known to other tests": (
        "native._listeners native._module native._reason native._thread"
    ),
    "graphs that were captured are counted and looked into": (
        "core.prefetch.prefetch._newest core.capture.graph_regions._regions"
    ),
    "what is compiled ahead is compared with what is launched": (
        "core.conv.kernel_products._listeners core.warmup.compilation._described "
        "core.warmup.compilation._lock core.warmup.compilation._products"
    ),
}


def named(listed: dict[str, str]) -> list[str]:
    return [f"sparse_bridge.{name}" for names in listed.values() for name in names.split()]


@pytest.fixture(scope="module")
def files():
    return trees(PACKAGE)


@pytest.mark.slow  # reads the sources of the package
def test_all_state_has_an_owner_or_a_reason(files):
    found, owned = kept(files), forgotten(files)
    assert len(found & owned) > 30, "what owners forget was not read"
    excepted = named(EXCEPTIONS)
    assert sorted(found - owned) == sorted(excepted)


@pytest.mark.slow  # reads the sources of all tests
def test_tests_leave_private_names_alone(files):
    found = touched(TESTS, files)
    excepted = named(TOUCHED)
    assert {name for _, name in found} >= set(excepted), "an exception that nobody needs"
    assert [one for one in found if one[1] not in excepted] == []


@pytest.fixture
def planted(tmp_path):
    """write(path, source) a file of a package or of its tests; returns the package's files."""
    (tmp_path / "package").mkdir()

    def write(path: str, source: str) -> dict:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(source)
        return trees(tmp_path / "package")

    return write


@pytest.mark.parametrize(
    "source, name",
    [
        ("_kept = {}\ndef keep(key):\n    _kept[key] = 1", "_kept"),
        ("_kept: list = []\ndef keep():\n    def inner():\n        _kept.append(1)", "_kept"),
        ("_kept = 0\ndef keep():\n    global _kept\n    _kept += 1", "_kept"),
        ("_kept = local()\ndef keep():\n    _kept.value = 1", "_kept"),
        ("_kept = count()\ndef keep():\n    return next(_kept)", "_kept"),
        ("class A:\n    kept = {}\n    def keep(self):\n        A.kept[1] = 2", "A.kept"),
        ("class A:\n    def keep(self):\n        self.x = 1\n_kept = A()", "_kept"),
        ("@functools.cache\ndef keep():\n    return 1", "keep"),
    ],
)
def test_planted_state_is_found(planted, source, name):
    made = planted("package/a.py", source)
    assert kept(made) == {f"package.a.{name}"} and not forgotten(made) & kept(made)
    reset = f"\ndef clear():\n    {name}.clear()\n@state.owns\ndef reset():\n    clear()\n"
    made = planted("package/a.py", source + reset)
    assert kept(made) and kept(made) <= forgotten(made)


@pytest.mark.parametrize(
    "source",
    [
        "_TABLE = {1: 2}\ndef find(key):\n    return _TABLE[key]",
        "_names = []\ndef find():\n    _names = []\n    _names.append(1)",
        "_lock = Lock()\ndef renew():\n    global _lock\n    _lock = Lock()",
        "@functools.cache\ndef square(x):\n    return x * x",
        "class A:\n    def __init__(self):\n        self.x = 1\nONE = A()",
    ],
)
def test_what_does_not_change_is_no_state(planted, source):
    assert kept(planted("package/a.py", source)) == set()


def test_an_owner_may_be_marked_elsewhere(planted):
    planted("package/a.py", "_kept = A()\ndef forget():\n    _kept.clear()\n")
    made = planted("package/b.py", "from . import a\nstate.owns(a.forget)\n")
    assert "package.a._kept" in forgotten(made)


@pytest.mark.parametrize(
    "source",
    [
        "from package import a\na._kept",
        "import package.a\npackage.a._kept.clear()",
        "import package.a as other\nother._kept = 1",
        "from package.a import _kept",
        "from package import a\ndef test(patch):\n    patch.setattr(a, '_kept', 1)",
        "def test(patch):\n    patch.setattr('package.a._kept', 1)",
        "from package import a\ndef test(rules):\n    rules.set(a, _kept=1)",
    ],
)
def test_a_planted_touch_is_found(planted, tmp_path, source):
    planted("package/a.py", "_kept = {}")
    made = planted("tests/test_a.py", source)
    assert touched(tmp_path / "tests", made) == [("test_a.py", "package.a._kept")]


def test_one_call_forgets_everything(monkeypatch):
    """Of every owner, in the order that users of others come first."""
    order = []
    own = {name: lambda name=name: order.append(name) for name in state.owners()}
    monkeypatch.setattr(state, "owners", lambda: own)
    state.reset()
    assert sorted(order) == sorted(own) and len(order) > 5
    assert order.index(plan.__name__) < order.index(self_check.__name__)


FRESH = """
import torch
from sparse_bridge import settings, state
from sparse_bridge.core import functional as sparse
from sparse_bridge.core.conv import plan
from sparse_bridge.core.maps import map_cache

coords = torch.tensor([[0, 1, 1], [0, 1, 2]], dtype=torch.int32)

def run():
    voxels = sparse.coordinate_map(coords)
    same = sparse.submanifold(voxels, sparse.kernel_offsets((3, 3)))
    map_cache.store_of(coords)
    return sparse.conv(torch.ones(2, 4), torch.ones(9, 4, 4), None, same)

settings.update(fp32="ieee")
before = run()
assert plan.count() and map_cache.count()
state.reset()
assert not plan.count() and not map_cache.count()
assert settings.get().fp32 == "ieee"
assert torch.equal(run(), before)
"""


@pytest.mark.slow
def test_a_process_goes_on_after_it_has_forgotten():
    subprocess.run([sys.executable, "-c", FRESH], check=True, timeout=PATIENCE)
