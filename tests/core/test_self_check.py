"""The self-check: it passes on kernels that work, and finds wrong ones, by part; what then runs."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import sparse_bridge
from sparse_bridge import log, settings, state
from sparse_bridge.core import functional
from sparse_bridge.core.conv import kernel_products, registry
from sparse_bridge.core.conv.dataflow import Case
from sparse_bridge.core.conv.epilogue import Norm
from sparse_bridge.core.device import device_support as devices
from sparse_bridge.core.device import precision, self_check, self_check_problems
from sparse_bridge.errors import DeviceError, KernelError
from sparse_bridge.kernels.runtime import target as targets
from sparse_bridge.kernels.runtime.target import Target
from sparse_bridge.refusals import Why
from tests.checks import assert_close, assert_error
from tests.core.layers import layer, tensors

CUDA = torch.device("cuda", 0)
HOPPER = Target("cuda", "sm_90", 32, 132, 227 << 10, raw=True)
HALF, SINGLE = torch.float16, torch.float32
kernels = [pytest.mark.interpreted, pytest.mark.emulated]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    self_check.reset()
    log.reset()
    yield
    monkeypatch.undo()
    self_check.reset()


def _inside(mode):
    def work(function):
        with mode:
            function(torch.ones(2))

    return work


MODES = {
    "fake tensors": lambda function: _inside(FakeTensorMode(allow_non_fake_inputs=True))(function),
    "traced": lambda function: make_fx(function, tracing_mode="fake", pre_dispatch=True)(torch.ones(2)),
    "batched": lambda function: torch.func.vmap(function)(torch.ones(2)),
    "default device": lambda function: _inside(torch.device("meta"))(function),
}


def chosen(device, dtype):
    case = Case(device, dtype)
    flow = registry.choose(case)
    return flow.name, flow.target(case)


def lane_target(lane):
    device = torch.device(lane.device, 0) if lane.device == "cuda" else torch.device("cpu")
    return device, targets.of(device)


def parts_of(target):
    """All but what takes gigabytes."""
    return [part for part in self_check.parts_of(target) if part != self_check.FAR]


@pytest.mark.usefixtures("kernel_lane")
class TestOnKernels:
    """Where kernels run: interpreter, emulated GPUs, GPUs."""

    pytestmark = kernels

    def test_everything_passes(self, kernel_lane):
        device, target = lane_target(kernel_lane)
        verdicts = [self_check.run(device, target, part) for part in parts_of(target)]
        assert [v.problem for v in verdicts] == [None] * len(parts_of(target))
        assert self_check.failures() == () and devices.notes() == ()

    @pytest.mark.parametrize("mode", MODES)
    def test_a_first_call_inside_of_other_work_passes(self, kernel_lane, mode):
        """As the first one of a process inside of `torch.export`."""
        device, target = lane_target(kernel_lane)
        problems = [NotImplemented]

        def first(x):
            problems[:] = [self_check.run(device, target, part).problem for part in ("int32 keys", "fp32")]
            return x + 1

        MODES[mode](first)
        assert problems == [None, None]

    @pytest.mark.parametrize("part", ["fp16", "fp32"])
    def test_a_wrong_product_is_found(self, kernel_lane, monkeypatch, part):
        from sparse_bridge.kernels.gemm.gather_gemm import GatherGemm

        device, target = lane_target(kernel_lane)
        right = GatherGemm.__call__

        def one_element_off(self, x, w, bias, y, *rest):
            y = right(self, x, w, bias, y, *rest)
            y[77, 5] += 0.5 * y.float().square().mean().sqrt().to(y.dtype)
            return y

        monkeypatch.setattr(GatherGemm, "__call__", one_element_off)
        problem = self_check.run(device, target, part).problem
        for word in (part, "self-check", "row 77", "channel 5"):
            assert word in problem
        assert [v.part for v in self_check.failures()] == [part]

    def test_rounding_to_tf32_is_found(self, kernel_lane, monkeypatch):
        """What a compiler does that ignores the asked-for precision."""
        from sparse_bridge.kernels.gemm.gather_gemm import GatherGemm

        device, target = lane_target(kernel_lane)
        right = GatherGemm.__call__

        def rounded(t):
            return (t.view(torch.int32) & -(1 << 13)).view(torch.float32)

        monkeypatch.setattr(GatherGemm, "__call__", lambda self, x, w, *rest: right(self, rounded(x), w, *rest))
        assert "largest error" in self_check.run(device, target, "fp32").problem

    def test_a_kernel_that_leaves_rows_unwritten_is_found(self, kernel_lane, monkeypatch):
        from sparse_bridge.kernels.gemm.gather_gemm import GatherGemm

        device, target = lane_target(kernel_lane)
        monkeypatch.setattr(GatherGemm, "__call__", lambda self, x, w, bias, y, *rest: y)
        assert "4800 of 4800 results are not finite" in (self_check.run(device, target, "fp32").problem)

    @pytest.mark.parametrize("part", self_check.KEYS)
    def test_a_hash_table_that_loses_keys_is_found(self, kernel_lane, monkeypatch, part):
        from sparse_bridge.kernels.maps import hash_table

        device, target = lane_target(kernel_lane)
        right = hash_table.hash_insert

        def losing(table, *rest):
            right(table, *rest)
            table.keys[table.keys.argmax()] = -1

        monkeypatch.setattr(hash_table, "hash_insert", losing)
        problem = self_check.run(device, target, part).problem
        assert part in problem and "neighbours are wrong" in problem

    def test_new_coordinates_in_another_order_are_found(self, kernel_lane, monkeypatch):
        from sparse_bridge.kernels.maps import new_rows

        device, target = lane_target(kernel_lane)
        right = new_rows.number_new_rows
        monkeypatch.setattr(new_rows, "number_new_rows", lambda *given: right(*given).flip(0))
        problem = self_check.run(device, target, self_check.NEW_COORDINATES).problem
        assert "kernel maps with new coordinates" in problem and "another order" in problem

    @pytest.mark.parametrize("broken, words", [("keys", "not sorted"), ("table", "where sorted rows are")])
    def test_rows_that_are_not_sorted_are_found(self, kernel_lane, monkeypatch, broken, words):
        """Keys that are all one, and a table that does not follow."""
        from sparse_bridge.kernels.maps import row_ranks

        device, target = lane_target(kernel_lane)
        right = row_ranks.keys_kernel.launch

        def keyless(device, target, grid, args, *rest):
            right(device, target, grid, args, *rest)
            args[3].view().fill_(7)

        if broken == "table":
            monkeypatch.setattr(row_ranks, "rename_values", lambda *_: None)
        else:
            monkeypatch.setattr(row_ranks.keys_kernel, "launch", keyless)
        problem = self_check.run(device, target, self_check.NEW_COORDINATES).problem
        assert "kernel maps with new coordinates" in problem and words in problem

    def test_a_pair_that_is_lost_is_found(self, kernel_lane, monkeypatch):
        from sparse_bridge.kernels.maps import new_rows

        device, target = lane_target(kernel_lane)
        right = new_rows.link_new_rows

        def losing(*given):
            linked, scattered = right(*given)
            scattered.nbr[tuple(torch.nonzero(scattered.nbr >= 0)[5])] = -1
            return linked, scattered

        monkeypatch.setattr(new_rows, "link_new_rows", losing)
        problem = self_check.run(device, target, self_check.NEW_COORDINATES).problem
        assert "1 of " in problem and "pairs are wrong" in problem

    @pytest.mark.parametrize("part", ["wgrad fp16", "wgrad fp32"])
    def test_a_wrong_gradient_of_a_weight_is_found(self, kernel_lane, monkeypatch, part):
        from sparse_bridge.kernels.gemm.wgrad_gemm import WgradGemm

        device, target = lane_target(kernel_lane)
        right = WgradGemm.__call__

        def one_off(self, x, dy, dw):
            right(self, x, dy, dw)
            dw[3, 4, 5] += dw.float().square().mean().sqrt().to(dw.dtype)
            return dw

        monkeypatch.setattr(WgradGemm, "__call__", one_off)
        problem = self_check.run(device, target, part).problem
        assert f"{part} products failed" in problem and f"row {3 * 32 + 4}, channel 5" in problem

    @pytest.mark.parametrize("part", self_check_problems.POOLS)
    @pytest.mark.parametrize("way", ["forward", "backward"])
    def test_a_wrong_pool_is_found(self, kernel_lane, monkeypatch, part, way):
        from sparse_bridge.kernels.ops import pooling

        device, target = lane_target(kernel_lane)
        right, place = getattr(pooling, f"pool_{way}"), {"forward": 2, "backward": 5}[way]

        def one_off(*given):
            right(*given)
            given[place][77, 5] += 3.0

        monkeypatch.setattr(pooling, f"pool_{way}", one_off)
        problem = self_check.run(device, target, part).problem
        assert part in problem and "row 77, channel 5" in problem

    def test_rows_behind_two_gibibytes_that_are_read_wrongly_are_found(self, kernel_lane, rules, monkeypatch):
        """The same code over features of half a megabyte: an offset that loses its upper bits."""
        from sparse_bridge.kernels.gemm.gather_gemm import GatherGemm

        device, target = lane_target(kernel_lane)
        rules.set(self_check_problems, _FAR_BYTES=1 << 19)
        assert self_check.run(device, target, self_check.FAR).problem is None
        self_check.reset()
        right = GatherGemm.__call__

        def wrapping(self, x, *rest):
            return right(self, torch.cat([x[: len(x) // 2], x[: len(x) - len(x) // 2]]), *rest)

        monkeypatch.setattr(GatherGemm, "__call__", wrapping)
        assert "beyond 2 GiB" in self_check.run(device, target, self_check.FAR).problem

    def test_counters_without_atomics_are_found(self, kernel_lane, monkeypatch):
        from sparse_bridge.kernels.maps import hash_table

        device, target = lane_target(kernel_lane)
        right = hash_table.hash_insert

        def racing(table, *rest):
            right(table, *rest)
            table.flags[1] -= 32

        monkeypatch.setattr(hash_table, "hash_insert", racing)
        assert "counted" in self_check.run(device, target, "int32 keys").problem

    def test_a_dtype_that_fails_computes_in_torch(self, kernel_lane, fake_gpu, monkeypatch, caplog):
        """On maps that kernels made; other dtypes keep their kernels."""
        device, target = lane_target(kernel_lane)
        made = layer("submanifold", 2, device=kernel_lane.device)
        monkeypatch.setattr(self_check, "applies", lambda device: True)
        fake_gpu.has(answers={kernel_products: target})
        wrong = {"fp16": "fp16 products failed the self-check"}
        monkeypatch.setattr(self_check, "find_problem", lambda *asked: wrong.get(asked[-1]))
        with settings.override(dataflow="auto"), caplog.at_level(logging.WARNING, "sparse_bridge"):
            assert chosen(device, HALF) == ("per_offset", None)
            assert chosen(device, SINGLE)[1] is target
            x, weight, _, _ = tensors(made, 16, 32, dtype=HALF)
            y = functional.conv(x.to(kernel_lane.device), weight.to(kernel_lane.device), None, made.kmap)
        assert_close(y, made.truth(x, weight), HALF)
        records = [r.getMessage() for r in caplog.records if "fp16" in r.getMessage()]
        assert len(records) == (device.type != "cpu")  # torch is no news on a CPU
        for word in (str(device), target.arch, "run in torch", "doctor --json"):
            assert all(word in record for record in records)


@pytest.fixture
def gpu(fake_gpu, monkeypatch):
    """A GPU that is not there; `gpu[part] = problem` makes a part fail, `gpu.asked` lists them."""

    class Problems(dict):
        asked: tuple = ()

    problems = Problems()

    def find(device, target, part):
        problems.asked += (part,)
        return problems.get(part)

    monkeypatch.setattr(self_check, "find_problem", find)
    fake_gpu.has(target=HOPPER)
    with settings.override(dataflow="auto", self_check=True, warmup=False):
        yield problems


def test_a_part_is_checked_when_it_is_first_needed_and_once(gpu):
    assert gpu.asked == ()
    for _ in range(2):
        assert chosen(CUDA, HALF) == ("masked", HOPPER)
    assert gpu.asked == ("int32 keys", "fp16")
    devices.kernel_target(CUDA, key64=True)
    chosen(CUDA, SINGLE)
    chosen(CUDA, torch.float64)
    assert gpu.asked == ("int32 keys", "fp16", "int64 keys", "fp32")
    devices.kernel_target(torch.device("cuda", 1))
    assert gpu.asked[4:] == ("int32 keys",), "every device by itself"


def test_a_hash_table_that_fails_takes_all_kernels_away(gpu, caplog):
    gpu["int32 keys"] = "looking up coordinates by int32 keys failed the self-check (7 are wrong)"
    with caplog.at_level(logging.WARNING, "sparse_bridge"):
        assert chosen(CUDA, HALF) == ("per_offset", None)
        assert devices.kernel_target(CUDA) is None
    (record,) = caplog.records
    for word in ("cuda:0", "int32 keys", "7 are wrong", "per-offset"):
        assert word in record.getMessage()
    assert devices.kernel_target(CUDA, key64=True) is HOPPER
    (note,) = devices.notes()
    assert "cuda:0" in note and "int32 keys" in note


def test_a_dtype_that_fails_is_the_only_one_to_fall_back(gpu, caplog):
    gpu["fp16"] = "fp16 products failed the self-check (largest error 3)"
    with caplog.at_level(logging.WARNING, "sparse_bridge"):
        for _ in range(2):
            assert chosen(CUDA, HALF) == ("per_offset", None)
        assert chosen(CUDA, torch.bfloat16) == ("masked", HOPPER)
    (record,) = caplog.records
    assert "fp16 products failed" in record.getMessage() and "sm_90" in record.getMessage()
    assert record.getMessage().endswith("doctor --json`.")
    assert record.getMessage().partition(". ")[0] in registry.in_torch()


def test_the_reason_of_a_device_is_that_of_its_check(gpu, caplog):
    gpu["int32 keys"] = "look-ups failed the self-check"
    with caplog.at_level(logging.INFO, "sparse_bridge"):
        assert chosen(CUDA, SINGLE) == ("per_offset", None)
    why = Why.FLOW_DEVICE.says(CUDA, gpu["int32 keys"])
    assert [record.getMessage() for record in caplog.records] == [
        f"{why}. Using the per-offset dataflow in torch.",
        f"layers in float32 on cuda:0 run in torch: {why}.",
    ]


def test_the_report_says_what_kernels_do_not_multiply(gpu):
    assert chosen(CUDA, torch.float64) == ("per_offset", None)
    line = f"layers in float64 on cuda:0 run in torch: {Why.FLOW_DTYPE.says(torch.float64)}"
    assert line in str(sparse_bridge.report()).splitlines()
    state.reset()
    assert line not in str(sparse_bridge.report())


@pytest.mark.parametrize("part, dtype", [("int32 keys", HALF), ("fp16", HALF), ("fp32", SINGLE)])
@pytest.mark.parametrize("flow", ["masked", "unmasked"])
def test_a_forced_dataflow_raises_instead(gpu, flow, part, dtype):
    gpu[part] = f"{part} failed the self-check (wrong)"
    with settings.override(dataflow=flow):
        assert_error(lambda: chosen(CUDA, dtype), DeviceError, [flow, part, "cuda:0", "per_offset"])


def test_the_check_can_be_turned_off(gpu):
    gpu["fp16"] = "wrong"
    with settings.override(self_check=False):
        assert chosen(CUDA, HALF) == ("masked", HOPPER)
    assert gpu.asked == ()


def test_nothing_is_checked_on_cpu_tensors_or_for_torch_dataflows(gpu):
    chosen(torch.device("cpu"), HALF)
    with settings.override(dataflow="masked"):
        chosen(torch.device("cpu"), HALF)
    with settings.override(dataflow="per_offset"):
        chosen(CUDA, HALF)
    assert gpu.asked == ()


def test_a_kernel_that_raises_is_a_failure_and_memory_is_not(monkeypatch):
    def broken(device, target, part):
        raise RuntimeError("PassManager::run failed\nsecond line")

    monkeypatch.setitem(self_check._CHECKS, "products", ("{} products", broken))
    verdict = self_check.run(CUDA, HOPPER, "bf16")
    assert verdict.problem == ("bf16 products failed the self-check (RuntimeError: PassManager::run failed)")

    def full(device, target, part):
        raise torch.cuda.OutOfMemoryError("2 GiB")

    monkeypatch.setitem(self_check._CHECKS, "keys", ("{}", full))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        self_check.run(CUDA, HOPPER, "int32 keys")
    assert [v.part for v in self_check.failures()] == ["bf16"], "to be asked again later"
    self_check.reset()
    assert self_check.failures() == ()


def test_the_parts_of_a_target():
    turing = Target("cuda", "sm_75", 32, 40, 64 << 10, raw=True)
    assert self_check.products_of(turing) == ["fp16", "fp32"]
    assert self_check.products_of(HOPPER) == ["fp16", "bf16", "fp32", "tf32"]
    assert self_check.parts_of(turing) == [
        "int32 keys",
        "int64 keys",
        "new coordinates",
        "fp16",
        "fp32",
        "wgrad fp16",
        "wgrad fp32",
        "fp16 norms",
        "fp32 norms",
        "max pools",
        "avg pools",
        "sum pools",
        "features beyond 2 GiB",
    ]


def test_fp32_is_checked_as_layers_compute_it(monkeypatch):
    """Three TF32 products and IEEE each have a verdict of their own."""
    asked = []

    def spoilt(device, target, precision, nbr, x, weight):
        asked.append(precision)
        return x * float("nan")

    monkeypatch.setattr(self_check_problems, "multiply", spoilt)
    for mode in ("auto", "ieee", "auto"):
        with settings.override(fp32=mode):
            assert "not finite" in self_check.run(CUDA, HOPPER, "fp32").problem
    self_check.run(CUDA, HOPPER, "tf32")
    assert asked == ["tf32x3", "ieee", "tf32"]


BLACKWELL = Target("cuda", "sm_100", 32, 148, 227 << 10, raw=True)


@pytest.mark.parametrize("target", [HOPPER, BLACKWELL], ids=lambda target: target.arch)
def test_a_split_product_that_fails_gives_way_to_ieee_products(gpu, fake_gpu, caplog, monkeypatch, target):
    """Not to torch: layers that were resolved before are resolved again."""
    fake_gpu.has(target=target)
    forms, before = [], settings.generation

    def find(device, target, part):
        if part in self_check.KEYS:
            return None
        forms.append(precision.product_precision(target, SINGLE, "ieee"))
        return "fp32 products failed the self-check (wrong)" if forms[-1] == "tf32x3" else None

    monkeypatch.setattr(self_check, "find_problem", find)
    with caplog.at_level(logging.WARNING, "sparse_bridge"):
        for _ in range(2):
            assert chosen(CUDA, SINGLE) == ("masked", target)
    assert forms == ["tf32x3", "ieee"]
    assert settings.generation > before
    assert precision.product_precision(target, SINGLE, "ieee") == "ieee"
    assert precision.product_precision(target, SINGLE, "tf32") == "tf32"
    (record,) = caplog.records
    assert "IEEE multiply-adds" in record.getMessage()
    (note,) = devices.notes()
    assert "IEEE multiply-adds instead" in note
    self_check.reset()
    assert precision.product_precision(target, SINGLE, "ieee") == "tf32x3"


def test_ieee_products_that_fail_too_leave_fp32_to_torch(gpu, monkeypatch):
    gpu["fp32"] = "fp32 products failed the self-check (wrong)"
    assert chosen(CUDA, SINGLE) == ("per_offset", None)


def test_maps_with_new_coordinates_are_checked_when_one_is_built(gpu, caplog):
    gpu[self_check.NEW_COORDINATES] = "kernel maps with new coordinates failed the self-check (x)"
    assert devices.kernel_target(CUDA) is HOPPER
    with caplog.at_level(logging.WARNING, "sparse_bridge"):
        assert devices.kernel_target(CUDA, expands=True) is None
    assert devices.kernel_target(CUDA) is HOPPER
    (record,) = caplog.records
    assert "new coordinates" in record.getMessage()


@pytest.mark.usefixtures("kernel_lane")
class TestFallbacks:
    """What runs where a part fails, with the right answer."""

    pytestmark = kernels

    @pytest.fixture
    def failing(self, kernel_lane, monkeypatch):
        """A function that makes a part fail."""
        wrong = {}
        monkeypatch.setattr(self_check, "applies", lambda device: True)
        monkeypatch.setattr(self_check, "find_problem", lambda *asked: wrong.get(asked[-1]))

        def fail(part):
            wrong[part] = f"{part} failed the self-check"
            self_check.reset()

        return fail

    def test_gradients_of_weights(self, kernel_lane, failing, monkeypatch, caplog):
        from sparse_bridge.kernels.gemm.wgrad_gemm import WgradGemm

        made = layer("submanifold", 2, device=kernel_lane.device)
        x, weight, bias, dy = (t.to(kernel_lane.device) for t in tensors(made, 9, 12))
        (want,) = torch.autograd.grad(functional.conv(x, weight.requires_grad_(), bias, made.kmap), weight, dy)
        failing("wgrad fp32")

        def never(*_):
            raise AssertionError("the kernel ran")

        monkeypatch.setattr(WgradGemm, "__call__", never)
        other = weight.detach()[:, :, :11].clone().requires_grad_()  # a plan of its own
        with caplog.at_level(logging.WARNING, "sparse_bridge"):
            y = functional.conv(x, other, bias[:11], made.kmap)
            (got,) = torch.autograd.grad(y, other, dy[:, :11].contiguous())
        assert_close(got, want[:, :, :11].double(), SINGLE)
        assert any("Gradients of weights" in r.getMessage() for r in caplog.records)

    @pytest.mark.parametrize("activation", ["relu", "sigmoid", None])
    def test_norms(self, kernel_lane, failing, caplog, activation):
        made = layer("submanifold", 2, device=kernel_lane.device)
        x, weight, bias, dy = (t.to(kernel_lane.device) for t in tensors(made, 9, 12))
        norm = Norm(*(one.abs() + 0.1 for one in dy[:4]), 1e-3)
        failing("fp32 norms")
        with torch.no_grad(), caplog.at_level(logging.INFO, "sparse_bridge"):
            want = functional.conv(x, weight, bias, made.kmap)
            want = F.batch_norm(want, *norm[:4], eps=norm.eps) + dy
            if activation is not None:
                want = getattr(torch, activation)(want)
            got = functional.conv(x, weight, bias, made.kmap, norm=norm, residual=dy, activation=activation)
        assert torch.equal(got, want)
        assert any("apart from their convolutions" in r.getMessage() for r in caplog.records)

    def test_pools(self, kernel_lane, failing, monkeypatch):
        from sparse_bridge.kernels.ops import pooling

        made = layer("strided", 2, device=kernel_lane.device)
        x = torch.randn(len(made.x_coords), 7).to(kernel_lane.device)
        want = functional.pool(x, made.kmap, "max")
        failing("max pools")
        monkeypatch.setattr(pooling, "pool_forward", None)
        assert torch.equal(functional.pool(x, made.kmap, "max"), want)

    def test_features_beyond_two_gibibytes_raise(self, kernel_lane, failing):
        made = layer("submanifold", 2, device=kernel_lane.device)
        failing(self_check.FAR)
        device = kernel_lane.device  # pages that nobody touches
        storage = torch.empty((1 << 31) + 64, dtype=torch.uint8, device=device)
        x = storage.view(torch.float16)[: made.kmap.n_in * 16].view(-1, 16).zero_()
        weight = torch.zeros(made.kmap.n_offsets, 16, 8, dtype=torch.float16, device=device)
        with settings.override(dataflow="masked"):
            assert_error(
                lambda: functional.conv(x, weight, None, made.kmap),
                KernelError,
                ["beyond 2 GiB", "2.0 GiB", "per_offset"],
            )


@pytest.mark.gpu
def test_on_this_gpu_at_first_use():
    """All parts pass, and once its kernels are compiled the check is a matter of milliseconds; the
    limit leaves room for other processes on the GPU."""
    device, target = CUDA, targets.of(CUDA)
    for _ in range(2):
        self_check.reset()
        verdicts = [self_check.run(device, target, part) for part in parts_of(target)]
        assert [v.problem for v in verdicts] == [None] * len(verdicts)
    assert sum(v.milliseconds for v in verdicts) < 2000
