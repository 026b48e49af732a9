"""Layers that are launched at their call with what followed them last time."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_bridge import policy
from sparse_bridge.core.conv import convolution, deferred, fused_plan, layers
from sparse_bridge.core.conv.epilogue import Epilogue, Norm
from sparse_bridge.core.conv.plan import ConvForm
from tests.checks import assert_close
from tests.core.layers import layer, tensors


class Unit:
    """A convolution of 6 to 10 channels, a norm, perhaps a sum, and an activation."""

    def __init__(self, sums=False, bias=True, steps="na"):
        self.made = layer("submanifold", 2)
        self.x, self.weight, _, _ = tensors(self.made, 6, 10)
        self.norm = [torch.rand(10), torch.rand(10) + 0.5, torch.rand(10), torch.rand(10)]
        self.bias = torch.rand(1, 10) if bias else None
        self.steps, self.given = steps, None
        self.other = torch.randn(self.made.truth(self.x, self.weight).shape) if sums else None

    def conv(self):
        epilogue = Epilogue(None if self.bias is None else self.bias.view(-1), norm=self.given)
        y = layers.convolve_layer(self, self.x, self.weight, self.made.kmap, epilogue, ConvForm())
        return deferred.features_of(y)

    def normed(self, y):
        return F.batch_norm(y, *self.norm) if "n" in self.steps else y

    def __call__(self):
        with torch.no_grad():
            y = self.conv()
            y = y if self.given else self.normed(y)
            y = y if self.other is None else y + self.other
            return F.relu(y) if "a" in self.steps else y

    def want(self):
        """By torch in fp64, with the present operands."""
        y = self.made.truth(self.x, self.weight)
        if self.bias is not None:
            y = y + self.bias.view(-1).double()
        if "n" in self.steps:
            y = F.batch_norm(y, *(one.double() for one in self.norm))
        y = y if self.other is None else y + self.other.double()
        return F.relu(y) if "a" in self.steps else y

    def known(self):
        """It has been seen twice what follows."""
        for _ in range(2):
            self()
        return self


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(convolution, "MIN_DEFERRED_ELEMENTS", [0, 0])


@contextlib.contextmanager
def launches():
    """Plans that launched, by their steps."""
    seen, original = [], fused_plan.FusedPlan.launch

    def launch(self, given, bias, residual):
        seen.append(self.steps)
        return original(self, given, bias, residual)

    fused_plan.FusedPlan.launch = launch
    try:
        yield seen
    finally:
        fused_plan.FusedPlan.launch = original


UNITS = {
    "norm": {"steps": "n"},
    "activation": {"steps": "a"},
    "both": {},
    "no bias": {"bias": False},
    "sum": {"sums": True},
    "sum alone": {"sums": True, "steps": ""},
    "norm and sum": {"sums": True, "steps": "n"},
}


@pytest.mark.parametrize("name", UNITS)
def test_the_next_call_is_one_launch(name):
    unit = Unit(**UNITS[name])
    first = unit()
    unit()
    with launches() as seen:
        third = unit()
    assert len(seen) == 1 and type(third) is torch.Tensor
    assert torch.equal(first, third)
    assert_close(third, unit.want())


def test_it_is_launched_at_the_call():
    unit = Unit().known()
    with torch.no_grad(), launches() as seen:
        y = unit.conv()
        call = y.conv.call
        assert seen == ["na"] and call.launched is not None
        z = F.relu(unit.normed(y))
    assert seen == ["na"] and call.launched is None
    assert_close(z, unit.want())


def test_with_a_sum_it_is_launched_at_the_sum():
    unit = Unit(sums=True).known()
    with torch.no_grad(), launches() as seen:
        y = unit.normed(unit.conv())
        assert seen == []
        y = y + unit.other
        assert seen == ["nsa"]
        want = unit.want()
        unit.other.zero_()
        assert_close(F.relu(y), want)


def test_a_norm_of_the_call_itself():
    unit = Unit(sums=True)
    unit.given = Norm(*unit.norm, 1e-5)
    unit.known()
    with launches() as seen:
        assert_close(unit(), unit.want())
    assert seen == ["nsa"]
    unit.norm = [torch.rand(10) + 0.5 for _ in range(4)]
    unit.given = Norm(*unit.norm, 1e-5)
    with launches() as seen:
        assert_close(unit(), unit.want())
    assert seen == []


def test_whoever_reads_in_between_sees_the_convolution_and_ends_it():
    unit = Unit(steps="na").known()
    plain = unit.made.truth(unit.x, unit.weight) + unit.bias.view(-1)
    for _ in range(policy.EARLY_LAUNCHES.failures):
        with torch.no_grad(), launches() as seen:
            assert_close(unit.conv() + 0, plain)
        assert seen == ["na"]
        for _ in range(3):  # and learns again what follows
            assert_close(unit(), unit.want())
    with launches() as seen:
        for _ in range(4):
            assert_close(unit(), unit.want())
    assert seen == []


def test_another_norm_or_activation_than_last_time():
    unit = Unit().known()
    with torch.no_grad():
        other = [torch.rand(10) + 0.5 for _ in range(4)]
        y = F.relu(F.batch_norm(unit.conv(), *other))
        plain = unit.made.truth(unit.x, unit.weight) + unit.bias.view(-1)
        assert_close(y, F.relu(F.batch_norm(plain, *(one.double() for one in other))))
        unit.known()
        want = F.sigmoid(F.batch_norm(plain, *(one.double() for one in unit.norm)))
        assert_close(torch.sigmoid(unit.normed(unit.conv())), want)
        unit.known()
        y = F.batch_norm(unit.conv(), *unit.norm, eps=0.1)
        assert_close(y, F.batch_norm(plain, *(one.double() for one in unit.norm), eps=0.1))


def test_statistics_that_change_between_the_calls():
    unit = Unit().known()
    with torch.no_grad():
        y = unit.conv()
        unit.norm[0].add_(1)
        assert_close(F.relu(unit.normed(y)), unit.want())
        unit.norm[1].mul_(2)
        unit.weight.mul_(1.5)
    with launches() as seen:
        assert_close(unit(), unit.want())
    assert seen == ["na"], "changes in place need no new plan"


def replaced(unit, name):
    """The unit with other memory behind its tensors, as `.data` is assigned."""
    if name == "weight's strides":
        unit.weight.data = unit.weight.data.transpose(0, 1).contiguous().transpose(0, 1)
    elif name == "features' strides":
        unit.x = torch.cat([unit.x, unit.x], 1)[:, :6]
    elif name == "all dtypes":
        unit.x, unit.weight.data, unit.bias.data = unit.x.double(), unit.weight.double(), unit.bias
        for one in unit.norm:
            one.data = one.double()
    elif name == "memory":
        unit.norm[2].data = torch.rand(10)
    elif name == "columns":
        unit.weight.data, unit.bias = unit.weight.data[..., :7], unit.bias[:, :7]
        for one in unit.norm:
            one.data = one.data[:7]


def test_a_norm_that_does_not_fit_is_refused_by_itself():
    unit = Unit().known()
    unit.norm[0].data = torch.rand(9)
    with torch.no_grad():
        y = unit.conv()
        with pytest.raises(RuntimeError, match="running_mean"):
            unit.normed(y)


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class _Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


MODES = {
    "inference": torch.inference_mode,
    "gradients": torch.enable_grad,
    "functions": _Functions,
    "dispatches": _Dispatches,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("where", ["layer", "norm"])
@pytest.mark.parametrize("name", MODES)
def test_modes(name, where):
    unit = Unit().known()
    with torch.no_grad(), contextlib.ExitStack() as stack, launches() as seen:
        if where == "layer":
            stack.enter_context(MODES[name]())
        y = unit.conv()
        if where == "norm":
            stack.enter_context(MODES[name]())
        z = F.relu(unit.normed(y))
    assert seen == (["na"] if where == "norm" else [])
    assert z.is_inference() == (name == "inference")
    assert_close(z, unit.want(), torch.bfloat16 if name == "autocast" else torch.float32)


def test_torch_without_guards(monkeypatch):
    monkeypatch.setattr(fused_plan, "TENSOR_GUARDS", None)
    unit = Unit().known()
    with launches() as seen:
        for _ in range(3):
            assert_close(unit(), unit.want())
    assert seen == []


def test_plans_hold_no_features():
    import weakref

    unit = Unit().known()
    gone = weakref.ref(unit.x)
    unit.x = unit.x.clone()
    assert gone() is None


class Whole(Unit):
    """The same of a container, whose calls say themselves what follows."""

    activation, alpha = "relu", 0.0

    def __call__(self):
        norm = Norm(*self.norm, 1e-5)
        epilogue = Epilogue(self.bias.view(-1), self.activation, self.alpha, norm)
        with torch.no_grad():
            return self.conv_with(epilogue)

    def conv_with(self, epilogue):
        return layers.convolve_layer(self, self.x, self.weight, self.made.kmap, epilogue, ConvForm())

    def want(self):
        if self.activation == "relu":
            return super().want()
        self.steps = "n"
        return F.leaky_relu(super().want(), self.alpha)


def test_a_container_is_launched_by_its_last_call():
    unit = Whole()
    first = unit()
    with launches() as seen:
        second = unit()
    assert seen == [""] and torch.equal(first, second)
    assert_close(second, unit.want())


def test_what_a_container_changes_is_seen():
    unit = Whole().known()
    unit.norm[0].add_(1)
    unit.norm[2].data = torch.rand(10)
    with launches() as seen:
        assert_close(unit(), unit.want())
    assert seen == [""], "the same tensors with other values"
    unit.norm = [torch.rand(10) + 0.5 for _ in range(4)]
    with launches() as seen:
        assert_close(unit(), unit.want())
    assert seen == []
    unit.activation, unit.alpha = "leaky_relu", 0.25
    with launches() as seen:
        assert_close(unit(), unit.want())
        unit.alpha = 0.5
        assert_close(unit(), unit.want())
    assert seen == []


@pytest.mark.parametrize("kind", [Unit, Whole])
@pytest.mark.parametrize("name", ["weight's strides", "features' strides", "all dtypes", "memory", "columns"])
def test_other_operands(name, kind):
    unit = kind().known()
    replaced(unit, name)
    for _ in range(3):
        assert_close(unit(), unit.want())


# With gradients a container runs its layers one by one.
@pytest.mark.parametrize("name", [name for name in MODES if name != "gradients"])
def test_modes_around_a_container(name):
    unit = Whole().known()
    with torch.no_grad(), MODES[name](), launches() as seen:
        y = unit()
    assert seen == [] and y.is_inference() == (name == "inference")
    assert_close(y, unit.want(), torch.bfloat16 if name == "autocast" else torch.float32)


def test_a_container_that_always_changes_makes_few_plans(monkeypatch):
    made = []
    original = layers.fused_plan
    monkeypatch.setattr(layers, "fused_plan", lambda *given: made.append(1) or original(*given))
    unit = Whole()
    for _ in range(20):
        unit.norm = [torch.rand(10) + 0.5 for _ in range(4)]
        assert_close(unit(), unit.want())
    assert len(made) == policy.FUSED_PLANS.max_tries
