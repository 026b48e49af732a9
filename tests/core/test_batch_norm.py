"""Batch normalisation in training against torch's own layers in fp64, by kernels and in torch."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

from sparse_bridge import settings
from sparse_bridge.core.ops import batch_norm as batch_norms
from sparse_bridge.core.ops.batch_norm import batch_norm, serves
from sparse_bridge.errors import DataTypeError, UnsupportedError
from sparse_bridge.kernels.runtime import target as targets
from tests.checks import assert_close
from tests.clouds import features
from tests.fake_gpu import HOPPER

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]


def layer(channels, dtype=torch.float32, device="cpu", seed=0, **options):
    norm = nn.BatchNorm1d(channels, **options).to(device)
    if norm.affine:
        norm.weight.data = features(1, channels, seed, dtype, device)[0]
        norm.bias.data = features(1, channels, seed + 1, dtype, device)[0]
    return norm


def apply(norm, x, relu=False, count=None):
    vectors = norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked
    return batch_norm(x, vectors, momentum=norm.momentum, eps=norm.eps, relu=relu, count=count)


@pytest.fixture
def runs(calls_of, map_lane):
    """How often the kernels' function ran; asserted to be always or never."""
    seen = calls_of(batch_norms, "run_directly")
    yield seen
    assert bool(seen) == map_lane.kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}], ids=str)
def test_three_steps(map_lane, runs, dtype, relu, options):
    """As training under autocast does it: halves, parameters and statistics in fp32."""
    norm = layer(18, device=map_lane.device, momentum=0.2, **options)
    want = copy.deepcopy(norm).cpu().double()
    for step in range(3):
        n = 200 + 57 * step
        x = (features(n, 18, step) * 3 + 50).to(dtype).to(map_lane.device).requires_grad_()
        dy = features(n, 18, step + 9, dtype, map_lane.device)
        y = apply(norm, x, relu)
        wide = x.detach().cpu().double().requires_grad_()
        z = want(wide)
        gradient = dy.cpu().double()
        if relu:  # cut off where the result, in its own dtype, is not positive
            gradient = gradient * (y.detach().cpu() > 0)
        z.backward(gradient)
        y.backward(dy)
        assert y.dtype == x.grad.dtype == dtype
        assert_close(y, z.relu() if relu else z, dtype, "y")
        assert_close(x.grad, wide.grad, dtype, "dx")
    for name, value in want.state_dict().items():
        assert_close(norm.state_dict()[name], value, torch.float32, name)
    for name, parameter in want.named_parameters():
        assert norm.get_parameter(name).grad.dtype == torch.float32
        assert_close(norm.get_parameter(name).grad, parameter.grad, dtype, name)


@pytest.mark.parametrize("relu", [False, True])
def test_rows_that_a_counter_tells(map_lane, runs, relu):
    n, spare = 333, 67
    norm, whole = layer(20, device=map_lane.device), layer(20, device=map_lane.device)
    x = torch.full((n + spare, 20), float("nan"), device=map_lane.device)
    x[:n] = features(n, 20, device=map_lane.device)
    dy = features(n + spare, 20, 3, device=map_lane.device)
    short, leaf = x[:n].clone().requires_grad_(), x.requires_grad_()
    count = torch.tensor([n - 1], dtype=torch.int32, device=map_lane.device)
    y, want = apply(norm, leaf, relu, count), apply(whole, short, relu)
    y.backward(dy)
    want.backward(dy[:n])
    pairs = [(y, want, "y"), (leaf.grad, short.grad, "dx")]
    for got, expected, what in pairs:
        assert torch.equal(got[n:], torch.zeros_like(got[n:]))
        assert_close(got[:n], expected, what=what)
    for name, value in whole.state_dict().items():
        assert_close(norm.state_dict()[name], value, what=name)
    assert_close(norm.weight.grad, whole.weight.grad)
    assert_close(norm.bias.grad, whole.bias.grad)


@pytest.mark.parametrize("n", [0, 1])
def test_counters_of_next_to_nothing(map_lane, runs, n):
    norm = layer(6, device=map_lane.device)
    before = copy.deepcopy(norm.state_dict())
    x = torch.full((5, 6), float("nan"), device=map_lane.device)
    x[:n] = 3.0
    count = torch.tensor([n - 1], dtype=torch.int32, device=map_lane.device)
    leaf = x.requires_grad_()
    y = apply(norm, leaf, False, count)
    y.sum().backward()
    torch.testing.assert_close(y[:n], norm.bias.expand(n, 6), rtol=1e-3, atol=1e-3)
    assert (y[n:] == 0).all()
    assert (leaf.grad == 0).all()
    assert all(torch.equal(before[name], value) for name, value in norm.state_dict().items())


def test_layouts_and_frozen_parameters(map_lane, runs):
    """A slice of columns, a gradient without memory of its own, a weight that is not trained."""
    wide = features(140, 40, device=map_lane.device)
    norm = layer(17, device=map_lane.device)
    norm.weight.requires_grad_(False)
    want = copy.deepcopy(norm).cpu().double()
    leaf, x = wide.requires_grad_(), wide.detach().cpu().double().requires_grad_()
    apply(norm, leaf[:, 3:20]).sum().backward()
    want(x[:, 3:20]).sum().backward()
    assert (leaf.grad.cpu() - x.grad).abs().max() < 1e-4
    assert norm.weight.grad is None
    assert_close(norm.bias.grad, want.bias.grad)


def test_nothing_is_differentiated_without_need(map_lane, runs):
    norm = layer(4, device=map_lane.device)
    x = features(9, 4, device=map_lane.device)
    with torch.no_grad():
        assert not apply(norm, x).requires_grad
    with torch.inference_mode():
        apply(norm, x)
    assert norm.num_batches_tracked == 2
    kept, y = apply(norm, x), apply(norm, x)
    for result in (y, kept, kept):  # each has statistics of its own, also the second time
        gradient = torch.autograd.grad(result.square().sum(), norm.weight, retain_graph=True)[0]
        want = torch.autograd.grad(
            nn.functional.batch_norm(x, None, None, norm.weight, norm.bias, True).square().sum(), norm.weight
        )[0]
        assert_close(gradient, want)


def test_version_counters_move_as_under_torch(map_lane, runs):
    """Which leaves those of the running statistics alone."""
    norm, x = layer(4, device=map_lane.device), features(9, 4, device=map_lane.device)
    versions = []
    for run in (lambda: norm(x), lambda: apply(norm, x)):
        before = {name: buffer._version for name, buffer in norm.named_buffers()}
        run()
        versions.append({n: b._version - before[n] for n, b in norm.named_buffers()})
    assert versions[0] == versions[1] and versions[1]["num_batches_tracked"] == 1


def test_fp64_and_odd_arguments_go_to_torch(map_lane, monkeypatch):
    monkeypatch.setattr(batch_norms, "run_directly", None)
    norm = layer(5, torch.float64, map_lane.device).double()
    x = features(30, 5, dtype=torch.float64, device=map_lane.device).requires_grad_()
    torch.testing.assert_close(apply(norm, x, True), copy.deepcopy(norm)(x).relu())
    assert torch.autograd.gradcheck(
        lambda a: batch_norm(a, (norm.weight, norm.bias, None, None, None), momentum=0.1, eps=1e-5),
        x[:7].detach().requires_grad_(),
    )
    norm = layer(5, device=map_lane.device)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        apply(norm, features(1, 5, device=map_lane.device))
    with pytest.raises(RuntimeError):
        apply(norm, features(9, 6, device=map_lane.device))
    with pytest.raises(RuntimeError):
        apply(layer(5, device="meta"), features(9, 5, device=map_lane.device))
    x = features(9, 5, device=map_lane.device)
    with pytest.raises(DataTypeError, match="expected int32"):
        apply(norm, x, count=torch.zeros(1, device=map_lane.device))
    norm.num_batches_tracked = norm.num_batches_tracked.float()
    before = norm.num_batches_tracked.item()
    apply(norm, x)
    assert norm.num_batches_tracked == before + 1


def test_which_features_kernels_take(fake_gpu):
    """By metadata alone, whatever the device."""
    known = {arch: targets.described(arch) for arch in ("sm_75", "sm_90")}
    for arch, target in known.items():
        fake_gpu.has(answers={batch_norms: target})
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            wanted = dtype != torch.float64 and (arch, dtype) != ("sm_75", torch.bfloat16)
            assert (serves(torch.empty(3, 4, dtype=dtype)) is target) == wanted
        assert serves(torch.empty(3, 0)) is None and serves(torch.empty(3, 4, 5)) is None
        assert serves(torch.empty(1, device="meta").expand((1 << 31) - 5, 3)) is None
    with settings.override(dataflow="per_offset"):
        fake_gpu.gone()
        assert serves(torch.empty(3, 4)) is None


@pytest.mark.parametrize("ahead", [True, False])
def test_both_passes_are_compiled_together_at_first_use(fake_gpu, ahead):
    """With launches that do nothing, on a GPU that is not there."""
    pytest.importorskip("triton")
    from sparse_bridge.kernels.runtime import precompile

    target, launches = dataclasses.replace(targets.described("sm_90"), raw=True), []
    batch_norms.reset()
    fake_gpu.has(
        answers={batch_norms: target},
        launches=lambda kernel, *args: launches.append((bool(precompile.dry_runs), kernel.name, args[-1])),
    )
    norm, x = layer(16), features(30, 16).requires_grad_()
    both = ["partials", "apply", "grad_partials", "dx"]
    with settings.override(warmup=ahead):
        apply(norm, x).sum().backward()
    compiled = [(name, key) for beforehand, name, key in launches if beforehand]
    real = [(name, key) for beforehand, name, key in launches if not beforehand]
    assert [name for name, _ in real] == [f"batch_norm_{name}" for name in both]
    assert compiled == (real if ahead else [])
    launches.clear()
    apply(norm, x)
    assert [beforehand for beforehand, *_ in launches] == [False, False]


def test_norms_in_training_are_launched_by_address(monkeypatch):
    """Both ways, and without a second look at the layer's vectors."""
    pytest.importorskip("triton")
    from tests.walk_apis import pretended_gpu

    norm, x = torch.nn.BatchNorm1d(32), torch.randn(24, 32).half().requires_grad_()
    looked = []

    def step():
        y = batch_norms.batch_norm_training(norm, x, True)
        y.backward(torch.zeros_like(y))

    def slow(*args):
        pytest.fail("a steady norm looks at its arguments again")

    with pretended_gpu() as gpu, monkeypatch.context() as patch:
        gpu.has(answers={batch_norms: HOPPER})
        step()
        gpu.has(launches=slow)
        patch.setattr(batch_norms, "serves", looked.append)
        step()
        assert looked == []
        norm.half()  # another kind of layer
        batch_norms.batch_norm_training(norm, x, True)
        assert len(looked) == 1
    batch_norms.reset()


@pytest.fixture
def first_of_its_kind():
    """What batch norm in training makes of features, on a GPU that is not there, whose kernels for
    them have still to be compiled."""
    pytest.importorskip("triton")
    from tests.walk_apis import pretended_gpu

    with pretended_gpu() as gpu, settings.override(warmup=True):
        gpu.has(answers={batch_norms: HOPPER})
        batch_norms.reset()
        yield lambda x: batch_norm(x, (None,) * 5, momentum=0.1, eps=1e-3)
    batch_norms.reset()


@pytest.mark.parametrize(("transform", "shape"), [("vmap", (2, 5, 8)), ("grad", (5, 8))])
def test_transforms_are_refused_before_anything_is_compiled(first_of_its_kind, transform, shape):
    """Their tensors have no memory."""
    with pytest.raises(UnsupportedError, match=r"torch\.func"):
        getattr(torch.func, transform)(lambda x: first_of_its_kind(x).sum(0).sum())(torch.randn(shape))


def test_features_that_a_transform_has_left_behind(first_of_its_kind):
    kept = []
    torch.func.grad(lambda x: kept.append(x) or x.sum())(torch.randn(5, 8))
    assert first_of_its_kind(kept[0]).shape == (5, 8)
