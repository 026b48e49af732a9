"""What a convolution decides once and finds again: whatever may change between two calls has its
effect, errors stay what they are, and nothing of a scene is held."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from sparse_bridge import policy, settings
from sparse_bridge.core import functional
from sparse_bridge.core.conv import plan, registry
from sparse_bridge.core.conv.convolution import conv
from sparse_bridge.core.conv.epilogue import Epilogue, Norm
from sparse_bridge.core.device import self_check, trace
from sparse_bridge.errors import UnsupportedError
from sparse_bridge.kernels.tiles.epilogue_bits import BIAS, NORM
from tests.checks import assert_close
from tests.core.layers import layer, leaves, tensors
from tests.fake_gpu import HOPPER

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]


@pytest.fixture
def made(lane):
    return layer("submanifold", 2, device=lane.device)


def warm(made, lane, dtype=torch.float32, groups=1):
    """(x, weight, bias) of a layer that has run twice."""
    operands = tensors(made, 6, 10, dtype=dtype, groups=groups)[:3]
    x, weight, bias = (t.to(lane.device) for t in operands)
    for _ in range(2):
        conv(x, weight, bias, made.kmap, groups=groups)
    return x, weight, bias


def right(lane, made, x, weight, bias=None, groups=1, dtype=torch.float32, **options):
    with lane.serving(dtype):
        y = conv(x, weight, bias, made.kmap, groups=groups, **options)
    exact = [None if t is None else t.detach().cpu().double() for t in (x, weight, bias)]
    assert_close(y, made.truth(*exact, groups), dtype)


def test_tensors_may_be_others_at_every_call(lane, made):
    x, weight, bias = warm(made, lane)
    right(lane, made, x, weight)
    right(lane, made, x, weight, bias)
    right(lane, made, x, weight, bias.half())
    right(lane, made, x, weight.transpose(1, 2).contiguous().transpose(1, 2), bias)
    right(lane, made, x, weight[:1].expand(9, 6, 10), bias)
    right(lane, made, x, weight[..., ::2], bias[::2].contiguous())
    right(lane, made, torch.cat([x, x], 1)[:, :6], weight, bias)
    right(lane, made, x.t().contiguous().t(), weight, bias)
    right(lane, made, x.double(), weight.double(), bias, dtype=torch.float64)
    right(lane, made, x, weight[:, :3], bias, groups=2)
    shared = torch.nn.Parameter(weight.clone())
    right(lane, made, x, shared, bias)
    shared.data = weight[..., :5].clone()
    right(lane, made, x, shared, bias[:5])
    shared.data = weight.double()
    right(lane, made, x.double(), shared, bias, dtype=torch.float64)


def test_maps_may_be_others_at_every_call(lane):
    first, second = (layer("submanifold", 2, seed=s, device=lane.device) for s in (0, 1))
    turned = layer("inverse", 2, device=lane.device)
    _, weight, bias = warm(first, lane)
    for made in (second, turned, first):
        rows = tensors(made, 6, 10)[0].to(lane.device)
        right(lane, made, rows, weight, bias)


WRONG = {
    "channels": lambda x, w, b: (x[:, :5], w, b, {}),
    "rows": lambda x, w, b: (x[:-1], w, b, {}),
    "one axis": lambda x, w, b: (x[:, 0], w, b, {}),
    "weights of fewer offsets": lambda x, w, b: (x, w[:-1], b, {}),
    "no offsets": lambda x, w, b: (x, w[:0], b, {}),
    "dtype of x": lambda x, w, b: (x.half(), w, b, {}),
    "integers": lambda x, w, b: (x.int(), w.int(), b, {}),
    "device of x": lambda x, w, b: (x.to("meta"), w, b, {}),
    "device of the weight": lambda x, w, b: (x, w.to("meta"), b, {}),
    "device of the bias": lambda x, w, b: (x, w, b.to("meta"), {}),
    "length of the bias": lambda x, w, b: (x, w, b[:-1], {}),
    "dtype of the bias": lambda x, w, b: (x, w, b.int(), {}),
    "layout": lambda x, w, b: (x, w, b, {"layout": "oiv"}),
    "groups": lambda x, w, b: (x, w, b, {"groups": 3}),
    "activation": lambda x, w, b: (x, w, b, {"activation": "tanh"}),
    "norm": lambda x, w, b: (x, w, b, {"norm": Norm(b, b[1:], None, None, 1e-5)}),
    "half a norm": lambda x, w, b: (x, w, b, {"norm": Norm(b, b, b, None, 1e-5)}),
    "a norm with gradients": lambda x, w, b: (
        x,
        w.clone().requires_grad_(),
        b,
        {"norm": Norm(b, b.abs(), None, None, 1e-5)},
    ),
    "an activation with gradients": lambda x, w, b: (x, w.clone().requires_grad_(), b, {"activation": "relu"}),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_those_of_a_first_call(lane, made, name):
    x, weight, bias = warm(made, lane)
    for activation in ("relu", None):
        conv(x, weight, bias, made.kmap, activation=activation)
    norm = Norm(bias, bias.abs(), None, None, 1e-5)
    conv(x, weight, bias, made.kmap, norm=norm)
    *wrong, options = WRONG[name](x, weight, bias)

    def error():
        with pytest.raises(Exception) as caught:
            conv(*wrong, made.kmap, **options)
        return type(caught.value), str(caught.value)

    later = error()
    with settings.override(strict=True):  # other settings: nothing is decided yet
        assert error() == later


def test_epilogues_may_change(lane, made):
    x, weight, bias = warm(made, lane)
    base = conv(x, weight, bias, made.kmap)
    for alpha in (0.1, 0.5):
        y = conv(x, weight, bias, made.kmap, activation="leaky_relu", alpha=alpha)
        torch.testing.assert_close(y, torch.where(base >= 0, base, base * alpha))
    gain = torch.full_like(bias, 2)
    for eps, vectors in ((1e-5, (None, None)), (1.0, (None, None)), (1.0, (gain, bias))):
        norm = Norm(bias, bias.square(), *vectors, eps)
        want = torch.nn.functional.batch_norm(base, norm.mean, norm.var, *vectors, eps=eps)
        torch.testing.assert_close(conv(x, weight, bias, made.kmap, norm=norm), want)


def test_settings_may_change(lane, made):
    x, weight, bias = warm(made, lane)
    seen = []
    for flow in ("per_offset", "explicit", "per_offset"):
        with settings.override(dataflow=flow), trace.record() as events:
            right(lane, made, x, weight, bias)
            right(lane, made, x, weight, bias)
        seen += [event.dataflow for event in events]
    assert seen == ["per_offset"] * 2 + ["explicit"] * 2 + ["per_offset"] * 2


def test_settings_may_change_before_the_backward_pass(lane, made):
    *operands, dy = tensors(made, 6, 10)
    x, weight, bias = leaves(operands, lane.device)
    for step in range(2):
        x.grad = weight.grad = bias.grad = None
        y = conv(x, weight, bias, made.kmap)
        with settings.override(fp32="ieee" if step else "auto"):
            y.backward(dy.to(lane.device))
    exact = leaves([t.double() for t in operands], "cpu")
    made.truth(*exact).backward(dy.double())
    for mine, truth in zip((x, weight, bias), exact, strict=True):
        assert_close(mine.grad, truth.grad)


def test_autocast_may_be_switched(lane, made):
    x, weight, bias = warm(made, lane)
    held = weight.clone().requires_grad_()
    for dtype in (torch.bfloat16, torch.float16):
        with lane.serving(dtype):
            with torch.autocast(lane.device, dtype):
                for _ in range(2):
                    y = conv(x, held, bias, made.kmap)
            assert y.dtype == dtype
            (gradient,) = torch.autograd.grad(y.sum(), held)
        assert gradient.dtype == torch.float32 and gradient.stride() == held.stride()
        assert conv(x, weight, bias, made.kmap).dtype == torch.float32


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0)])
def test_gradients_lie_as_the_weight_does(lane, made, order):
    """`layout`, and dense or with room between."""
    *operands, dy = tensors(made, 6, 10)
    x, weight, bias = leaves(operands, lane.device)
    back = [order.index(i) for i in range(3)]
    for room in (0, 3):
        memory = torch.empty([weight.shape[i] + room for i in order], device=lane.device)
        held = memory.permute(*back)[:9, :6, :10].copy_(weight.detach()).requires_grad_()
        for _ in range(2):
            y = conv(x, held, bias, made.kmap)
            (gradient,) = torch.autograd.grad(y, held, dy.to(lane.device))
        assert gradient.stride() == held.stride()
        x64, weight64, bias64 = leaves([t.double() for t in operands], "cpu")
        made.truth(x64, weight64, bias64).backward(dy.double())
        assert_close(gradient, weight64.grad)


def test_a_gradient_of_the_gradient_is_refused(lane, made):
    x, weight, bias = warm(made, lane)
    x = x.requires_grad_()
    y = conv(x, weight, bias, made.kmap)
    dy = torch.ones_like(y, requires_grad=True)
    (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
    with pytest.raises(RuntimeError, match="has no gradient of its own"):
        dx.sum().backward()


def test_nothing_of_a_scene_is_held(lane):
    made = layer("submanifold", 2, device=lane.device)
    x, weight, bias = warm(made, lane)
    held = weight.clone().requires_grad_()
    conv(x, held, bias, made.kmap).sum().backward()
    seen = [weakref.ref(one) for one in (x, weight, bias, held, made.kmap.rulebook)]
    del x, weight, bias, held, made
    gc.collect()
    assert [ref() for ref in seen] == [None] * 5


def plan_of(made, x, weight):
    return plan.find(x, weight, made.kmap, Epilogue(), plan.ConvForm())


def test_plans_are_dropped_with_what_they_stand_on():
    with settings.override(dataflow="per_offset"):
        made = layer("submanifold", 2)
        x, weight, _, _ = tensors(made, 6, 10)
        first = plan_of(made, x, weight)
        assert plan_of(made, x, weight) is first is plan.present(first)
        with settings.override(tune="off"):
            second = plan_of(made, x, weight)
            assert second is not first and plan.present(first) is second
        assert plan_of(made, x, weight) is first, "settings that come back"
        self_check.reset()
        third = plan_of(made, x, weight)
        assert third is not first and plan.present(first) is third
        with registry.preferred("explicit"):
            assert plan_of(made, x, weight) is not third
        plan.reset()
        assert plan.count() == 0 and plan_of(made, x, weight) is not third


def test_plans_do_not_pile_up(rules):
    rules.set(policy, PLANS=4, PLAN_SETTINGS=3)
    plan.reset()
    made = layer("submanifold", 2)
    for number in range(12):
        with settings.override(dataflow="per_offset", cache_dir=str(number)):
            for channels in range(1, 10):
                plan_of(made, *tensors(made, channels, 3)[:2])
            assert plan.count() <= 3 * 4
    plan.reset()


@pytest.fixture
def launches(fake_gpu, monkeypatch):
    """What a GPU that is not there would be told: (kernel, arguments by name) of every launch."""
    from sparse_bridge.kernels.runtime.launch import Kernel

    seen = []

    def launch(self, device, target, grid, args, constants, options, key):
        seen.append((self.name, dict(zip(self.fn.arg_names, (*args, *constants), strict=True))))

    fake_gpu.has(target=HOPPER, launches=launch)
    monkeypatch.setattr(Kernel, "start", lambda self, *args: False)
    plan.reset()
    yield seen
    plan.reset()


def test_what_changes_reaches_the_kernel(launches):
    """Steady layers over one map, on a GPU."""
    with settings.override(dataflow="per_offset"):
        kmap = layer("submanifold", 2).kmap
        kmap.rulebook.table(0)
    x, weight, bias = torch.randn(kmap.n_in, 16), torch.randn(9, 16, 32), torch.randn(32)

    def told(name, *tensors, **options):
        for _ in range(2):
            launches.clear()
            conv(*tensors, kmap, **options)
        (arguments,) = [arguments for kernel, arguments in launches if kernel == "gather_gemm"]
        return arguments[name]

    norm = Norm(bias, bias, None, None, 1e-3)
    with settings.override(dataflow="masked"):
        assert told("PRECISION", x, weight, None) == "tf32x3"
        assert told("PRECISION", x, weight, None, allow_tf32=True) == "tf32"
        assert told("PRECISION", x.half(), weight.half(), None) == "ieee"
        assert told("stride_xn", x, weight, None) == 16
        assert told("stride_xn", torch.cat([x, x], 1)[:, :16], weight, None) == 32
        assert told("stride_wv", x, weight, None) == 512
        assert told("stride_wv", x, torch.cat([weight, weight], 1)[:, :16], None) == 1024
        ends = [(b, n) for b in (None, bias) for n in (None, norm)]
        assert [told("EPILOGUE", x, weight, b, norm=n) for b, n in ends] == [0, NORM, BIAS, BIAS | NORM]
        assert told("eps", x, weight, bias, norm=norm) == 1e-3
        assert told("eps", x, weight, bias, norm=norm._replace(eps=0.5)) == 0.5
        for alpha in (0.25, 0.5):
            assert told("alpha", x, weight, bias, activation="leaky_relu", alpha=alpha) == alpha
        assert told("w_ptr", x, weight, None) is weight
        assert told("x_ptr", x, weight, None) is x
        with settings.override(fp32="ieee"):
            assert told("PRECISION", x, weight, None) == "ieee"
        bound = set()
        for _ in range(3):
            with settings.override(fp32="ieee", tune="off"):
                assert told("PRECISION", x, weight, None) == "ieee"
            bound.add(len(kmap.rulebook.cache))
        assert len(bound) == 1, "launches under settings that come back are found again"


@pytest.mark.parametrize("c_in", [1, 3, 4, 8, 9])
def test_narrow_inputs_take_several_offsets_a_step(launches, c_in):
    """By rule, whatever the tuner knows; not where sums are split by masks, or in groups."""

    def served(flow, groups=1):
        with settings.override(dataflow="per_offset"):
            kmap = layer("submanifold", 2).kmap
            kmap.rulebook.table(0)
        launches.clear()
        tensors = torch.randn(kmap.n_in, groups * c_in), torch.randn(9, c_in, groups * 16)
        with settings.override(dataflow=flow, tune="cached"), torch.no_grad():
            conv(*tensors, None, kmap, groups=groups)
        return {kernel for kernel, _ in launches} & {"narrow_gemm", "gather_gemm", "grouped_gemm"}

    narrow = "narrow_gemm" if c_in <= 8 else "gather_gemm"
    assert served("masked") == served("unmasked") == {narrow}
    assert served("masked:2") == served("masked", groups=2) == {"gather_gemm"}


def test_the_backward_pass_follows_the_settings(launches):
    with settings.override(dataflow="per_offset"):
        kmap = layer("submanifold", 2).kmap
        kmap.rulebook.table(0)
        kmap.rulebook.lists()
    x = torch.randn(kmap.n_in, 16, requires_grad=True)
    weight = torch.randn(9, 16, 32, requires_grad=True)
    empty = torch.zeros(10, dtype=torch.int32)
    from sparse_bridge.core.maps.pair_lists import DevicePairs

    starts = torch.zeros(6, dtype=torch.int64)
    kmap.rulebook._pairs = DevicePairs(empty, empty, starts, True, 10)

    def precisions():
        return [arguments["PRECISION"] for _, arguments in launches if "PRECISION" in arguments]

    with settings.override(dataflow="masked"):
        for fp32, want in (("auto", "tf32x3"), ("ieee", "ieee"), ("auto", "tf32x3")):
            y = conv(x, weight, None, kmap)
            launches.clear()
            with settings.override(fp32=fp32):
                y.backward(torch.ones_like(y))
            assert precisions() == [want, "ieee"], "dgrad, then wgrad"


def test_folded_scenes_are_not_taken_for_plain_ones(lane):
    """Equal coordinates take their own way, with the same channels and weights."""
    coords = torch.tensor([[0, 1, 1], [0, 1, 1], [0, 2, 1]], dtype=torch.int32)
    plain = layer("submanifold", 2, device=lane.device)
    x, weight, bias = warm(plain, lane)
    cmap = functional.coordinate_map(coords.to(lane.device), (4, 4), 1)
    kmap = functional.submanifold(cmap, functional.kernel_offsets((3, 3)))
    rows = x[:3].contiguous()
    folded = conv(rows, weight, bias, kmap)
    with settings.override(strict=True):
        assert torch.equal(conv(rows, weight, bias, kmap), folded)
    with pytest.raises(UnsupportedError, match="no gradient"):
        conv(rows, weight.requires_grad_(), bias, kmap, activation="relu")
