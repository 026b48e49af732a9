"""`fp32_accum=False` is leave to add up in fp16."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge import state
from sparse_bridge.core.conv.plan import known_plans
from sparse_bridge.core.device.precision import product_precision
from sparse_bridge.kernels.runtime import target as targets
from tests.adapters.spconv import apis
from tests.checks import assert_close
from tests.clouds import cloud, features


@pytest.mark.parametrize("accum, precision", [(None, "ieee"), (True, "wide"), (False, "half")])
def test_what_a_layer_asks_for(accum, precision, monkeypatch):
    from sparse_bridge.adapters.spconv import conv

    asked = []
    make = conv.form_of

    def listening(*args):
        asked.append(make(*args))
        return asked[-1]

    monkeypatch.setattr(conv, "form_of", listening)
    with apis.standin() as sp:
        layer = sp.SubMConv3d(4, 8, 3, fp32_accum=accum)
        coords = cloud((4, 5, 4))
        x = features(len(coords), 4)
        plain = layer(sp.SparseConvTensor(x, coords, [4, 5, 4], 2))
        layer = layer.half()
        half = layer(sp.SparseConvTensor(x.half(), coords, [4, 5, 4], 2))
    assert [form.precision for form in asked] == ["ieee", precision]
    assert_close(half.features, plain.features.double(), torch.float16)


def test_who_takes_the_leave():
    asked = lambda arch, dtype, **options: product_precision(  # noqa: E731
        targets.described(arch), dtype, "half", **options
    )
    assert asked("sm_89", torch.float16) == asked("sm_90", torch.float16) == "half"
    assert asked("sm_90", torch.float16, wgrad=True) == "ieee"
    for arch, dtype in (("gfx942", torch.float16), ("sm_75", torch.float16), ("sm_90", torch.bfloat16)):
        assert asked(arch, dtype) == "ieee"


@pytest.mark.gpu
def test_on_a_gpu():
    from sparse_bridge.core import functional
    from tests.core.layers import layer, tensors

    made = layer("submanifold", 3, device="cuda")
    x, weight, _, dy = tensors(made, 64, 32, dtype=torch.float16)
    placed = [t.cuda().requires_grad_() for t in (x, weight)]
    y = functional.conv(*placed, None, made.kmap, fp16_accumulation=True)
    y.backward(dy.cuda())
    want = made.truth(x.double(), weight.double())
    assert_close(y, want, torch.bfloat16)  # as rough as its eight bits
    assert all(torch.isfinite(t.grad).all() for t in placed)


@pytest.fixture
def torch_switch():
    """torch's own switch for sums in fp16, put back afterwards."""
    matmul = torch.backends.cuda.matmul
    if not hasattr(torch._C, "_get_cublas_allow_fp16_accumulation"):
        pytest.skip("torch has the switch from 2.7 on")
    before = matmul.allow_fp16_accumulation
    yield lambda on: setattr(matmul, "allow_fp16_accumulation", on)
    matmul.allow_fp16_accumulation = before


def test_torchs_switch_counts_at_every_call(torch_switch):
    """Turned on and off between calls of the same layers; a layer that wants fp32 sums keeps them."""
    with apis.standin() as sp:
        layers = [sp.SubMConv3d(4, 8, 3, fp32_accum=accum).half() for accum in (None, True, False)]
        coords = cloud((4, 5, 4))
        x = features(len(coords), 4).half()

        def precisions():
            with torch.no_grad():
                for layer in layers:
                    layer(sp.SparseConvTensor(x, coords, [4, 5, 4], 2)).features  # noqa: B018
            return [plan.product.precision for plan in known_plans.plans.values()]

        state.reset()
        assert precisions() == ["ieee", "wide", "half"]
        for _ in range(2):
            torch_switch(True)
            assert precisions() == ["half", "wide", "half"]
            torch_switch(False)
            assert precisions() == ["ieee", "wide", "half"]


@pytest.mark.gpu
@pytest.mark.parametrize("trains", (False, True))
def test_torchs_switch_on_a_gpu(trains, torch_switch):
    """Results of a layer that has run change with the switch, and come back with it."""
    coords = cloud((9, 9, 9)).cuda()
    x = features(len(coords), 64).cuda().half()
    with apis.standin() as sp, torch.set_grad_enabled(trains):
        layer = sp.SubMConv3d(64, 64, 3).cuda().half()

        def rows():
            for _ in range(5):
                y = layer(sp.SparseConvTensor(x, coords, [9, 9, 9], 2)).features + 0
            return y.detach()

        before = rows()
        torch_switch(True)
        half = rows()
        torch_switch(False)
        after = rows()
    assert torch.equal(before, after) and not torch.equal(before, half)
    assert_close(half, before.double(), torch.bfloat16)
