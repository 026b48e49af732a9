"""`fp32_accum=False` is leave to add up in fp16."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge.core.device.precision import product_precision
from sparse_bridge.kernels.runtime import target as targets
from tests.adapters.spconv import doors
from tests.checks import assert_close
from tests.clouds import cloud, features


@pytest.mark.parametrize("accum, precision", [(None, "ieee"), (True, "ieee"), (False, "half")])
def test_what_a_layer_asks_for(accum, precision, monkeypatch):
    from sparse_bridge.adapters.spconv import conv

    asked = []
    make = conv.form_of

    def listening(*args):
        asked.append(make(*args))
        return asked[-1]

    monkeypatch.setattr(conv, "form_of", listening)
    with doors.standin() as sp:
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
