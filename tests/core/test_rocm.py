"""What ROCm releases get wrong: products of many rows, expandable segments."""

from __future__ import annotations

import logging

import pytest
import torch

from sparse_bridge import log, settings
from sparse_bridge.core import functional
from sparse_bridge.core.conv.dataflows import per_offset
from sparse_bridge.core.device import rocm
from sparse_bridge.core.device.device_support import kernel_target
from tests.checks import assert_close
from tests.core.layers import layer, leaves, tensors


@pytest.fixture
def broken_blas(rules, monkeypatch):
    """A BLAS that computes at most 100 rows right and leaves NaN below, and the limit to match;
    gives the row counts that it was asked for."""
    asked = []
    right = torch.mm, torch.addmm, torch.Tensor.__matmul__

    def spoiled(y, rows):
        asked.append(rows)
        if rows > 100:
            with torch.no_grad():
                y[100:] = float("nan")
        return y

    def mm(x, w, *, out=None):
        return spoiled(right[0](x, w) if out is None else right[0](x, w, out=out), len(x))

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", lambda b, x, w: spoiled(right[1](b, x, w), len(x)))
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda x, w: spoiled(right[2](x, w), len(x)))
    rules.set(rocm, MOST_ROWS=100)
    monkeypatch.setattr(rocm, "splits", lambda x: len(x) > rocm.MOST_ROWS and x.dtype in rocm._WIDE)
    return asked


@pytest.mark.parametrize("n", [1, 99, 100, 101, 200, 333])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_taken_in_parts(broken_blas, n, bias):
    generator = torch.Generator().manual_seed(n)
    x, w = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in ((n, 7), (7, 5))
    )
    b = torch.randn(5, generator=generator, dtype=torch.float64, requires_grad=True)
    y = rocm.linear(x, w, b if bias else None)
    want = torch.einsum("nk,km->nm", x, w) + (b if bias else 0)
    torch.testing.assert_close(y, want)
    up = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    leaves = (x, w, b) if bias else (x, w)
    got, truth = (torch.autograd.grad(out, leaves, up) for out in (y, want))
    torch.testing.assert_close(got, truth)
    out = torch.full((n, 5), float("nan"), dtype=torch.float64)
    with torch.no_grad():
        assert rocm.mm(x, w, out) is out
    torch.testing.assert_close(out, want - (b if bias else 0))
    assert max(broken_blas) <= 100


@pytest.mark.parametrize("flow", ["per_offset", "explicit"])
def test_layers_in_torch_take_parts(broken_blas, flow, monkeypatch):
    """More pairs and rows than one product may have, in every path of both dataflows."""
    # As of tensors on a GPU.
    monkeypatch.setattr(per_offset, "mm", lambda x, w, out: rocm.mm(x[: len(out)], w, out=out))
    monkeypatch.setattr(per_offset, "height_of", lambda n_rows, w: n_rows)
    monkeypatch.setattr(per_offset, "together", lambda w: False)
    with settings.override(dataflow=flow):
        made = layer("submanifold", shape=(20, 20), share=0.5, batch_size=2)
        assert len(made.x_coords) > 300
        for channels in ((16, 16), (3, 5), (24, 8)):
            *operands, dy = tensors(made, *channels, bias=False)
            x, weight = leaves(operands[:2], "cpu")
            y = functional.conv(x, weight, None, made.kmap)
            y.backward(dy)
            x64, weight64 = leaves([t.double() for t in operands[:2]], "cpu")
            want = torch.zeros_like(y, dtype=torch.float64)
            for v, (x_rows, y_rows) in enumerate(made.pairs):
                part = torch.einsum("nk,km->nm", x64[x_rows], weight64[v])
                want = want.index_add(0, y_rows, part)
            want.backward(dy.double())
            assert_close(y, want)
            assert_close(x.grad, x64.grad, what="dx")
            assert_close(weight.grad, weight64.grad, what="dw")
    assert broken_blas and max(broken_blas) <= 100


def test_only_rocm_and_wide_dtypes_take_parts(fake_gpu):
    class Rows:
        is_cuda, dtype, shape = True, torch.float32, (rocm.MOST_ROWS + 1, 4)

    x = Rows()
    fake_gpu.has(hip=None)
    assert not rocm.splits(x)
    fake_gpu.has(hip="7.2.1")
    assert rocm.splits(x)
    x.dtype = torch.float16
    assert not rocm.splits(x)
    x.dtype, x.shape = torch.float64, (rocm.MOST_ROWS, 4)
    assert not rocm.splits(x)
    x.shape, x.is_cuda = (rocm.MOST_ROWS + 1, 4), False
    assert not rocm.splits(x)


@pytest.fixture
def allocator(monkeypatch):
    log.reset()
    for name in rocm._ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    rocm.reset()
    yield monkeypatch
    rocm.reset()


@pytest.mark.parametrize("name", rocm._ALLOCATOR)
def test_expandable_segments_are_warned_about_once(allocator, fake_gpu, caplog, name):
    fake_gpu.has(hip="7.2.1")
    allocator.setenv(name, "max_split_size_mb:128, expandable_segments:True")
    with caplog.at_level(logging.WARNING, "sparse_bridge"), settings.override(dataflow="explicit"):
        for _ in range(2):
            kernel_target(torch.device("cuda", 0))
    (record,) = caplog.records
    assert name in record.getMessage() and "expandable_segments" in record.getMessage()


@pytest.mark.parametrize(
    "hip, value",
    [(None, "expandable_segments:True"), ("7.2.1", "expandable_segments:False"), ("7.2.1", "max_split_size_mb:128")],
)
def test_where_there_is_nothing_to_warn_about(allocator, fake_gpu, caplog, hip, value):
    fake_gpu.has(hip=hip)
    allocator.setenv("PYTORCH_CUDA_ALLOC_CONF", value)
    with caplog.at_level(logging.WARNING, "sparse_bridge"):
        rocm.warn_about_allocator()
    assert not caplog.records
