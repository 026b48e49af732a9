"""Products over all rows: those of kernels over the identity map, and which are."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

import sparse_bridge
from sparse_bridge import settings
from sparse_bridge.core.conv import convolution
from sparse_bridge.core.conv.epilogue import Epilogue
from sparse_bridge.core.ops import pointwise
from tests.checks import NothingComputed
from tests.clouds import features
from tests.patience import PATIENCE
from tests.rules import ruled

SIZES = [(1, 4, 8), (63, 16, 24), (64, 32, 32), (65, 7, 5), (300, 48, 80)]


def products(lane, rows, c_in, c_out, learns=False):
    """(result of the kernel, its operands)."""
    device = torch.device(lane.device)
    x = features(rows, c_in, seed=rows).to(device, torch.float16).requires_grad_(learns)
    w = (features(c_in, c_out, seed=1) / c_in**0.5).to(device, torch.float16).requires_grad_(learns)
    bias = features(1, c_out, seed=2)[0].to(device, torch.float16).requires_grad_(learns)
    kmap = pointwise.identity(rows, x.device, learns)
    return convolution.convolve(x, w[None], kmap, Epilogue(bias), pointwise.FORM), (x, w, bias)


@pytest.mark.emulated
@pytest.mark.interpreted
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_identity_map(kernel_lane, size):
    y, (x, w, bias) = products(kernel_lane, *size)
    exact = x.double() @ w.double() + bias.double()
    torch.testing.assert_close(y.double(), exact, rtol=2e-3, atol=2e-3)


@pytest.mark.emulated
@pytest.mark.interpreted
@pytest.mark.parametrize("size", SIZES[1:4], ids=str)
def test_its_gradients(kernel_lane, size):
    y, operands = products(kernel_lane, *size, learns=True)
    dy = features(*y.shape, seed=3).to(y)
    y.backward(dy)
    doubles = [one.detach().double().requires_grad_() for one in operands]
    (doubles[0] @ doubles[1] + doubles[2]).backward(dy.double())
    for one, exact in zip(operands, doubles, strict=True):
        scale = float(exact.grad.abs().max())
        torch.testing.assert_close(one.grad.double(), exact.grad, rtol=3e-3, atol=3e-3 * scale)


def test_maps_are_kept_for_the_last_numbers_of_rows(rules):
    rules.set(pointwise, _MAPS=2)
    device = torch.device("cpu")
    pointwise.reset()
    n = 7919  # rows that no graph of another test has captured
    first = pointwise.identity(n, device, False)
    assert pointwise.identity(n, device, False) is first and first.rulebook.n_rows == (n, n)
    for rows in (n + 1, n + 2):
        pointwise.identity(rows, device, False)
    assert pointwise.identity(n, device, False) is not first


def test_kernels_serve_where_nothing_speaks_against_them(monkeypatch):
    """On a pretended GPU whose kernels multiply fp16 alone."""
    given = []

    def row_kernels(case):
        given.append(case)
        return ("masked", "target") if case.dtype == torch.float16 else ("per_offset", None)

    monkeypatch.setattr(pointwise, "row_kernels", row_kernels)
    x, w = torch.randn(20, 8).half(), torch.randn(8, 8).half()
    asked = pointwise.by_kernel
    assert asked(x, w, None) and asked(x, w, w[0])
    assert not asked(x, w.float(), None) and not asked(x, w, w[0].float())  # torch's own error
    assert not asked(x.float(), w.float(), None) and not asked(x[:0], w, None)
    assert not asked(x.bfloat16(), w.bfloat16(), None) and given[-1].dtype == torch.bfloat16
    with torch.autocast("cpu", torch.float16):
        assert asked(x.float(), w.float(), None)
        assert not asked(x.double(), w.double(), None)
    with ruled(pointwise, _MOST_WEIGHT=63):
        assert not asked(x, w, None), "whatever the rows"
    with settings.override(dataflow="per_offset"):
        assert not asked(x, w, None)
    layer = Asking()
    sparse_bridge.dataflow(layer, "per_offset")
    assert not layer(x, w) and asked(x, w, None)


def test_what_serves_is_asked_once_under_the_same_settings(monkeypatch):
    given = []
    monkeypatch.setattr(pointwise, "row_kernels", lambda case: given.append(case) or ("masked", len(given) == 1))
    pointwise.reset()
    x, w = torch.randn(20, 8).half(), torch.randn(8, 8).half()
    assert [pointwise.by_kernel(x, w, None) for _ in range(3)] == [True] * 3 and len(given) == 1
    with settings.override(dataflow="auto", tune="off"):
        pointwise.by_kernel(x, w, None)
        assert len(given) == 2
    pointwise.reset()
    pointwise.by_kernel(x, w, None)
    assert len(given) == 3
    pointwise.reset()  # what was pretended


class Asking(torch.nn.Module):
    def forward(self, x, w):
        return pointwise.by_kernel(x, w, None)


def test_maps_of_captured_graphs_stay(rules, monkeypatch):
    rules.set(pointwise, _MAPS=1)
    device, capturing = torch.device("cpu"), [False]
    monkeypatch.setattr(pointwise, "capturing", lambda device: capturing[0])
    first = pointwise.identity(11, device, False)
    capturing[0] = True
    assert pointwise.identity(11, device, False) is first
    assert pointwise.identity(12, device, False) is None  # its memory would be the graph's
    capturing[0] = False
    for rows in (13, 14):
        pointwise.identity(rows, device, False)
    assert pointwise.identity(11, device, False) is first


def test_nothing_is_told_to_those_who_watch():
    with NothingComputed():
        kmap = pointwise.identity(1234, torch.device("cpu"), False)
    assert kmap.rulebook.table(0)[0].nbr[0].tolist() == list(range(1234))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["half", "autocast", "float", "wide", "forced"])
def test_which_products_are_the_kernels(calls_of, kind):
    asked = calls_of(pointwise, "convolve")
    dtype = torch.float32 if kind in ("float", "autocast") else torch.float16
    channels = 4096 if kind == "wide" else 32
    x = torch.randn(3000, channels, device="cuda", dtype=dtype)
    w = torch.randn(channels, channels, device="cuda", dtype=dtype) / channels**0.5
    dataflow = "per_offset" if kind == "forced" else "auto"
    with settings.override(dataflow=dataflow), torch.autocast("cuda", enabled=kind == "autocast"):
        y = pointwise.linear(x, w, None)
    torch.testing.assert_close(y.double(), x.double() @ w.double(), rtol=1e-2, atol=1e-2)
    assert bool(asked) == (kind in ("half", "autocast", "float"))
    assert y.dtype == (torch.float32 if kind == "float" else torch.float16)


@pytest.mark.gpu
def test_torchs_own_errors():
    x, w = torch.randn(8, 4, device="cuda").half(), torch.randn(4, 4, device="cuda")
    with pytest.raises(RuntimeError, match="dtype"):
        pointwise.linear(x, w)


def test_row_numbers_that_threads_make_at_once(monkeypatch):
    """Each gets as many as it asked for, whoever is last."""
    device, many = torch.device("cpu", 7), 1 << 18  # of a number that nobody else has
    own, code = torch.arange, pointwise.row_numbers.__code__
    last = max(line for *_, line in code.co_lines() if line is not None)
    made_few, made_many, few_there = (threading.Event() for _ in range(3))

    def arange(size, **given):
        made = own(size, **given)
        if size < many:
            made_few.set()
            assert made_many.wait(PATIENCE)
        return made

    def few():
        pointwise.row_numbers(device, 8)
        few_there.set()

    def returns(frame, event, _):
        if event == "line" and frame.f_lineno == last:
            made_many.set()
            assert few_there.wait(PATIENCE)
        return returns

    monkeypatch.setattr(torch, "arange", arange)
    thread, before = threading.Thread(target=few), sys.gettrace()
    thread.start()
    assert made_few.wait(PATIENCE)
    sys.settrace(lambda frame, *_: returns if frame.f_code is code else None)
    try:
        rows = pointwise.row_numbers(device, many)
    finally:
        sys.settrace(before)
        thread.join()
    assert len(rows) == many and rows[-1] == many - 1
