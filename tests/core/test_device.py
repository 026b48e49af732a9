"""Which code serves a device: no Triton, old or unknown GPUs, forced dataflows."""

from __future__ import annotations

import ast
import logging
import pathlib
import subprocess
import sys

import pytest
import torch

from sparse_bridge import log, settings
from sparse_bridge.core.conv import kernel_products, registry
from sparse_bridge.core.conv.dataflow import Case
from sparse_bridge.core.device.device_support import kernel_target
from sparse_bridge.errors import DeviceError, OverflowLimitError, SettingError, UnsupportedError
from sparse_bridge.kernels.runtime import target as targets
from sparse_bridge.kernels.runtime.target import Target
from sparse_bridge.kernels.tiles.tile import GemmSize, TileConfig
from sparse_bridge.kernels.tiles.tile_config import gather_tile, wgrad_tile
from tests.checks import assert_error

CUDA = torch.device("cuda", 0)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from sparse_bridge import settings
from sparse_bridge.core import functional
from sparse_bridge.errors import DeviceError

coords = torch.tensor([[0, 0], [0, 1], [0, 3]], dtype=torch.int32)
kmap = functional.submanifold(functional.coordinate_map(coords), functional.kernel_offsets((3,)))
x = torch.ones(3, 1, requires_grad=True)
y = functional.conv(x, torch.tensor([[[1.0]], [[10.0]], [[100.0]]]), None, kmap)
y.sum().backward()
print(y.flatten().tolist(), x.grad.flatten().tolist())
print(functional.pool(x, kmap, "sum").flatten().tolist())
with settings.override(dataflow="masked"):
    try:
        functional.submanifold(functional.coordinate_map(coords), functional.kernel_offsets((3,)))
    except DeviceError as error:
        print(error)
assert not any(name.startswith("triton") and sys.modules[name] for name in sys.modules)
"""


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Answers about devices and messages said once are kept for the process: start without them."""
    log.reset()
    targets.reset()
    yield
    monkeypatch.undo()
    targets.reset()


def test_without_triton_everything_runs_on_the_cpu():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=True)
    results, pooled, message = done.stdout.strip().splitlines()
    assert results == "[110.0, 11.0, 10.0] [11.0, 110.0, 10.0]"
    assert pooled == "[2.0, 2.0, 1.0]"
    for word in ("SPARSE_BRIDGE_DATAFLOW=masked", "Triton is not installed", "per_offset"):
        assert word in message


def test_a_gpu_without_triton_takes_the_torch_dataflow_and_says_so_once(fake_gpu, caplog):
    fake_gpu.has(triton=None)
    with caplog.at_level(logging.WARNING, "sparse_bridge"):
        assert kernel_target(CUDA) is None and kernel_target(CUDA) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for word in ("cuda:0", "Triton is not installed", "per-offset"):
        assert word in record.getMessage()


@pytest.mark.parametrize("flow", ["masked", "unmasked"])
def test_a_forced_triton_dataflow_never_falls_back(fake_gpu, flow):
    fake_gpu.has(triton=None)
    with settings.override(dataflow=flow):
        for device in (CUDA, torch.device("cpu")):
            assert_error(lambda d=device: kernel_target(d), DeviceError, [flow, str(device), "auto"])


def test_a_triton_that_is_too_old(fake_gpu):
    fake_gpu.has(triton=(2, 1, 0))
    assert "2.1.0 is older than 3.0" in targets.unavailable(CUDA)


def test_a_triton_that_breaks_on_import_reads_as_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert targets.triton_version() is None


def test_a_gpu_that_is_too_old(fake_gpu):
    fake_gpu.has(triton=(3, 6, 0), interpreted=False, hip=None, capability=(6, 1))
    assert "older than compute capability 7.5" in targets.unavailable(CUDA)


def test_a_gpu_that_triton_does_not_know(fake_gpu):
    class Driver:
        @property
        def active(self):
            raise RuntimeError("unknown architecture gfx000")

    pytest.importorskip("triton.runtime")
    fake_gpu.has(interpreted=False, capability=(9, 9), name="Mystery GPU", driver=Driver())
    reason = targets.unavailable(CUDA)
    assert "Mystery GPU" in reason and "unknown architecture gfx000" in reason
    assert kernel_target(CUDA) is None
    with settings.override(dataflow="masked"):
        assert_error(lambda: kernel_target(CUDA), DeviceError, ["Mystery GPU", "per_offset"])


def test_a_device_that_is_no_gpu(fake_gpu):
    fake_gpu.has(triton=(3, 6, 0))
    assert "'hpu'" in targets.unavailable(torch.device("hpu", 0))


def test_cpu_tensors_take_torch_unless_a_driver_serves_them():
    with settings.override(dataflow="auto"):
        assert kernel_target(torch.device("cpu")) is None
    for flow in ("per_offset", "explicit"):
        with settings.override(dataflow=flow):
            assert kernel_target(CUDA) is None
    pytest.importorskip("triton")
    if not targets.interpreted():
        assert "TRITON_INTERPRET=1" in targets.unavailable(torch.device("cpu"))


UNKNOWN = (("cuda", 999, None), ("cuda", 130, 64 << 10), ("hip", "gfx1399", None), ("hip", "gfx908", None))
KNOWN = [("cuda", arch, None) for arch in (75, 80, 86, 89, 90, 100, 120)]
KNOWN += [("hip", arch, None) for arch in ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1151", "gfx1201")]


@pytest.mark.parametrize("backend, arch, shared", [*UNKNOWN, *KNOWN])
def test_default_tiles_fit_every_target(backend, arch, shared):
    """An architecture nobody has heard of gets generic tiles that fit the least memory there is."""
    target = targets.make_target(backend, arch, 32, 16, shared, raw=True)
    assert (target.family == "generic") == ((backend, arch, shared) in UNKNOWN)
    assert 48 << 10 <= target.shared_memory <= 256 << 10
    for dtype in DTYPES:
        for c_in, c_out in ((1, 1), (3, 130), (64, 64), (512, 512)):
            tiles = [wgrad_tile(target, dtype, c_in, c_out)]
            tiles += [gather_tile(target, dtype, GemmSize(n, c_in, c_out, 27)) for n in (1, 100, 10**6)]
            for tile in tiles:
                assert isinstance(tile, TileConfig)
                assert tile.shared_bytes(dtype.itemsize) <= target.shared_memory
                assert min(tile.block_m, tile.block_n, tile.block_k) >= 16


def fake(gpu, arch, backend="cuda"):
    target = Target(backend, arch, 32, 16, 64 << 10, raw=True)
    gpu.has(answers={kernel_products: target})
    return target


def chosen(dtype, regular=True):
    case = Case(CUDA, dtype, regular)
    flow = registry.choose(case)
    return flow.name, flow.target(case)


def test_what_a_gpu_cannot_multiply_goes_to_torch(fake_gpu):
    with settings.override(dataflow="auto", self_check=False):
        turing = fake(fake_gpu, "sm_75")
        assert chosen(torch.float16) == ("masked", turing)
        assert chosen(torch.bfloat16) == ("per_offset", None)
        hopper = fake(fake_gpu, "sm_90")
        assert chosen(torch.bfloat16) == ("masked", hopper)
        assert chosen(torch.float64) == ("per_offset", None)
        assert chosen(torch.float16, regular=False) == ("grouped", hopper)
        assert chosen(torch.float64, regular=False) == ("per_offset", None)


@pytest.mark.parametrize("flow", ["masked", "unmasked", "grouped"])
def test_a_forced_dataflow_that_cannot_serve_says_why(fake_gpu, flow):
    """Nothing else runs in its place."""
    with settings.override(dataflow=flow, self_check=False):
        fake(fake_gpu, "sm_75")
        forced = "SPARSE_BRIDGE_DATAFLOW=" + flow
        for case, kind, words in (
            (Case(CUDA, torch.float64), UnsupportedError, ["do not multiply torch.float64"]),
            (Case(CUDA, torch.bfloat16), DeviceError, ["sm_75", "torch.bfloat16"]),
        ):
            assert_error(lambda c=case: registry.choose(c), kind, [forced, "auto", *words])
        assert registry.row_kernels(Case(CUDA, torch.float64)) == ("per_offset", None)
        assert registry.choose(Case(CUDA, torch.float16, False)).name == "grouped"
        assert registry.choose(Case(CUDA, torch.float64, False)).name == "per_offset"
    with settings.override(dataflow="explicit"):
        assert registry.choose(Case(CUDA, torch.float64)).name == "explicit"
        assert registry.choose(Case(CUDA, torch.float16, False)).name == "per_offset"


def test_every_dataflow_of_the_settings_has_a_file():
    for name, traits in settings.DATAFLOWS.items():
        flow = registry.entry(name)
        assert (flow.name, flow.kernels) == (name, traits.kernels)
    assert registry.entry(registry.automatic()[-1]).refusals(Case(CUDA, torch.float64, False)) == [], (
        "the last one serves everything"
    )


def test_nobody_compares_names_of_dataflows():
    """Attributes and methods of a dataflow say what it needs, so that a new one is a file of its own.
    `splits=` of `override.dataflow` is an option of "masked", by name."""
    package, seen = pathlib.Path(settings.__file__).parent, set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                words = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
                if words & settings.DATAFLOWS.keys():
                    seen.add(file.relative_to(package).as_posix())
    assert seen == {"core/conv/override.py"}


def test_tf32_is_asked_of_those_that_have_it():
    has = {"sm_75": False, "sm_80": True, "sm_90": True, "sm_120": True}
    for arch, answer in has.items():
        assert Target("cuda", arch, 32, 16, 1 << 16, raw=True).has_tf32 == answer
    has = {"gfx90a": False, "gfx942": True, "gfx950": False, "gfx1100": False, "gfx1201": False}
    for arch, answer in has.items():
        assert Target("hip", arch, 32, 16, 1 << 16, raw=True).has_tf32 == answer


def test_an_unknown_dataflow():
    with pytest.raises(SettingError, match=r"'fast'; expected one of auto, masked"):
        settings.update(dataflow="fast")


def test_a_launch_that_is_too_large(monkeypatch):
    """Rows x column blocks beyond a grid's 31 bits."""
    pytest.importorskip("triton")
    from sparse_bridge.core.geometry.weights import layout_of
    from sparse_bridge.errors import KernelError
    from sparse_bridge.kernels.gemm.gather_gemm import GatherGemm
    from sparse_bridge.kernels.gemm.gather_spec import GemmSpec
    from sparse_bridge.kernels.gemm.product import Product

    target = Target("cuda", "sm_90", 32, 132, 200 << 10, raw=True)
    nbr = torch.empty((1, (1 << 31) - 1), dtype=torch.int32, device="meta")
    weight = torch.empty((1, 16, 1 << 11), device="meta")
    tile = TileConfig(64, 16, 16, 4, 2)
    with pytest.raises((KernelError, OverflowLimitError), match=r"2147483647 rows.*2\^31"):
        product = Product(target, CUDA, torch.float16, "ieee", layout_of(weight, "vio"))
        GatherGemm(GemmSpec(product, tile, False), nbr, nbr.shape[1], 1)
