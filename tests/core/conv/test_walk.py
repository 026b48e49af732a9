"""The way of a convolution through the engine is short, and enters no file twice."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge import settings
from sparse_bridge.core.conv import plan
from sparse_bridge.core.conv.convolution import conv
from sparse_bridge.core.conv.epilogue import Norm
from sparse_bridge.core.maps.pair_lists import DevicePairs
from tests.core.layers import layer
from tests.walk import Walk, walk
from tests.walk_apis import LAUNCHER, walks

pytest.importorskip("triton")

STEADY = [
    "core/conv/convolution.py",
    "core/conv/plan.py",
    "core/conv/kernel_products.py",
    "kernels/gemm/gather_gemm.py",
    "kernels/runtime/launch.py",
]


@pytest.fixture
def kmap(monkeypatch):
    """A map of a GPU that is not there, whose compiled kernels do nothing."""
    from sparse_bridge.kernels.gemm import gather_gemm, wgrad_gemm
    from sparse_bridge.kernels.runtime import launch
    from sparse_bridge.kernels.runtime import target as targets

    class Compiled(dict):
        def get(self, key, default=None):
            return (lambda *args: None), (), ()

    with settings.override(dataflow="per_offset"):
        made = layer("submanifold", 2).kmap
        made.rulebook.table(0)
        made.rulebook.lists()
    empty, starts = torch.zeros(10, dtype=torch.int32), torch.zeros(6, dtype=torch.int64)
    made.rulebook._pairs = DevicePairs(empty, empty, starts, True, 10)
    hopper = targets.Target("cuda", "sm_90", 32, 132, 227 << 10, raw=True)
    monkeypatch.setattr(targets, "unavailable", lambda device: None)
    monkeypatch.setattr(targets, "of", lambda device: hopper)
    monkeypatch.setattr(launch.Kernel, "launch", lambda self, *args: None)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    sums = (gather_gemm.sum_partials_kernel, wgrad_gemm.sum_shares_kernel)
    for kernel in (gather_gemm.gather_gemm_kernel, wgrad_gemm.wgrad_kernel, *sums):
        monkeypatch.setattr(kernel, "_compiled", Compiled())
    plan.reset()
    with settings.override(dataflow="masked", native=False):
        yield made
    plan.reset()


def operands(kmap, gradients=False):
    x, weight = torch.randn(kmap.n_in, 16), torch.randn(9, 16, 32)
    return x.requires_grad_(gradients), weight.requires_grad_(gradients), torch.rand(32)


@pytest.mark.parametrize("fused", [False, True])
def test_a_steady_layer(kmap, fused):
    x, weight, bias = operands(kmap)
    norm = Norm(bias, bias, bias, bias, 1e-3) if fused else None
    options = {"norm": norm, "activation": "relu", "residual": None} if fused else {}

    def run():
        conv(x, weight, bias, kmap, **options)

    cold = walk(run)
    steady = walk(run)
    assert steady.files == STEADY and steady.twice == []
    assert steady.called <= 12 < cold.called
    with settings.override(tune="off"):
        assert walk(run).files != STEADY, "other settings, another plan"
        assert walk(run).files == STEADY


def test_partial_sums_are_launched_by_address(kmap, monkeypatch):
    """Those of mask splits."""
    from sparse_bridge.kernels.runtime import launch

    def slow(*args):
        pytest.fail("a steady layer looks at its arguments again")

    x, weight, bias = torch.randn(kmap.n_in, 16), torch.randn(9, 16, 32), torch.rand(32)
    with settings.override(dataflow="masked:2"):
        conv(x, weight, bias, kmap)
        launches = [one for one in kmap.rulebook.cache.values() if hasattr(one, "grid")]
        assert [one.spec.splits for one in launches] == [2]
        monkeypatch.setattr(launch.Kernel, "launch", slow)
        conv(x, weight, bias, kmap)


def test_sizes_of_one_tile_share_what_does_not_depend_on_the_map(kmap):
    x, weight, bias = operands(kmap)
    conv(x, weight, bias, kmap)
    (made,) = plan.plans()
    before = dict(made.forward._specs)
    with settings.override(dataflow="per_offset"):
        other = layer("submanifold", 2, shape=(16, 16)).kmap
        other.rulebook.table(0)
    assert -(-other.n_in // 64) != -(-kmap.n_in // 64)
    conv(torch.randn(other.n_in, 16), weight, bias, other)
    assert set(made.forward._specs.values()) == set(before.values())


def test_a_steady_training_step(kmap):
    x, weight, _ = operands(kmap, True)
    for _ in range(2):
        y = conv(x, weight, None, kmap)
        y.backward(torch.ones_like(y))
    forward = walk(lambda: conv(x, weight, None, kmap))
    assert forward.files == STEADY and forward.twice == []
    y, dy = conv(x, weight, None, kmap), torch.ones(kmap.n_out, 32)
    back = walk(lambda: y.backward(dy))
    wgrad = {"core/conv/dataflows/wgrad_product.py", "kernels/gemm/wgrad_gemm.py"}
    assert set(back.files) == {*STEADY, *wgrad}
    # Two products, the second in two launches.
    assert set(back.twice) <= {"core/conv/kernel_products.py", "kernels/runtime/launch.py"}
    assert back.called <= 20


def test_the_way_from_every_framework_to_the_launcher_is_short():
    seen = {}
    for name, steady, cold in walks():
        way = steady.until(*LAUNCHER)
        assert way.files[0].startswith(f"adapters/{name}/")
        assert len(way.files) <= 10 and way.twice == [], way.files
        # The framework's own function takes seven.
        wide = ["adapters/flex_gemm/conv.py:sparse_submanifold_conv3d"]
        assert way.wide(6) == (wide if name == "flex_gemm" else [])
        # The result's tensor and the call's count come behind the launch.
        assert len(steady.files) <= len(way.files) + 3 <= len(cold.files)
        assert set(steady.twice) <= {"adapters/torchsparse/tensors.py"}
        seen[name] = [file for file in way.files if file.startswith(("core/", "kernels/"))]
    assert seen.pop("flex_gemm") == ["core/maps/kernel_map.py", *STEADY]
    assert seen == dict.fromkeys(("spconv", "torchsparse", "minkowski"), STEADY)


def test_a_walk_sees_what_is_entered_twice_and_long_argument_lists():
    calls = [("a", "f", 2, True), ("b", "g", 7, True), ("b", "h", 1, False), ("a", "k", 3, True)]
    seen = Walk(calls)
    assert (seen.files, seen.twice, seen.wide(6)) == (["a", "b"], ["a"], ["b:g"])
    assert seen.until("b", "g").twice == [] and seen.until("b", "g").called == 2
    with pytest.raises(ValueError, match="not in list"):
        seen.until("b", "f")


@pytest.fixture
def launched(monkeypatch):
    """Launches of compiled kernels: (whether dtypes alone told it, grid, values, constants)."""
    from sparse_bridge.kernels.gemm import gather_gemm
    from sparse_bridge.kernels.runtime import launch

    seen = []
    for owner, short in ((gather_gemm, True), (launch, False)):

        def begin(entry, index, grid, values, constants, short=short):
            seen.append((short, grid, tuple(values), constants))
            return True

        monkeypatch.setattr(owner, "begin", begin)
    return seen


@pytest.mark.parametrize("flow", ["masked", "masked:2"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_kernel_that_has_run_is_launched_alike(kmap, launched, flow, fused):
    x, weight, bias = torch.randn(kmap.n_in, 16), torch.randn(9, 16, 32), torch.rand(32)
    norm = Norm(bias, bias, bias, bias, 1e-3) if fused else None
    with settings.override(dataflow=flow):
        conv(x, weight, bias, kmap, norm=norm)
    (product,) = [one for one in kmap.rulebook.cache.values() if hasattr(one, "grid")]
    y = torch.empty(kmap.n_out, 32)
    vectors = (bias, *(norm or (None,) * 4)[:4], None)
    launched.clear()
    product.spec.variants.clear()
    for _ in range(2):
        product(x, weight, vectors, y)
    n = 1 + (flow != "masked")
    first, second = launched[:n], launched[n:]
    assert [one[0] for one in first] == [False] * n and [one[0] for one in second] == [True] * n
    for (_, *before), (_, *after) in zip(first, second, strict=True):
        assert before[0] == after[0] and before[2] == after[2]
        differ = [a != b for a, b in zip(before[1], after[1], strict=True)]
        assert sum(differ) <= n - 1, "at most the memory of the partial sums"


@pytest.mark.parametrize("what", ["rows apart", "odd address", "other dtype", "odd vector"])
def test_a_kernel_for_other_tensors_is_looked_for(kmap, launched, what):
    x, weight, bias = operands(kmap)
    conv(x, weight, bias, kmap)
    (product,) = [one for one in kmap.rulebook.cache.values() if hasattr(one, "grid")]
    y = torch.empty(kmap.n_out, 32)
    if what == "rows apart":
        x = torch.randn(kmap.n_in, 32)[:, :16]
    elif what == "odd address":
        x = torch.randn(16 * kmap.n_in + 1)[1:].view(kmap.n_in, 16)
    elif what == "other dtype":
        weight = weight.half()
    else:
        bias = torch.rand(33)[1:]
    launched.clear()
    for _ in range(2):
        product(x, weight, (bias, None, None, None, None, None), y)
    usual = what in ("other dtype", "odd vector")  # of which there may be kernels, too
    assert [one[0] for one in launched] == [False, usual]
    assert launched[0][2] == launched[1][2] and launched[0][2][0] == x.data_ptr()
    assert bias.data_ptr() in launched[1][2] and weight.data_ptr() in launched[1][2]
