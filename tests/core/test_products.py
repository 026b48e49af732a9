"""Products by either library, against fp64."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge.core import functional
from sparse_bridge.core.conv import host_products

ROWS = (1, 15, 16, 17, 255, 257, 511, 512, 513, 4095, 4096, 4097, 9000)


@pytest.fixture(params=["torch", "onednn"])
def library(request, monkeypatch):
    linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if request.param == "onednn" and (linear is None or not torch.backends.mkldnn.is_available()):
        pytest.skip("this torch has no oneDNN")
    calls = []

    def counted(*args):
        calls.append(args[0].shape[int(args[0].stride(0) == 1)])
        return linear.default(*args)

    found = counted if request.param == "onednn" else None
    monkeypatch.setattr(host_products, "onednn", lambda: found)
    for name in ("_PAYS", "_PAYS_TRANSPOSED", "_LARGE"):
        monkeypatch.setattr(host_products, name, 1)
    yield request.param
    assert all(count in (16, 64, 256) or count % host_products.STEP == 0 for count in calls)
    assert bool(calls) == (request.param == "onednn")


def close(found, expected, terms=64):
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-5 * terms**0.5)


@pytest.mark.parametrize("c_in, c_out", [(33, 5), (64, 64)])
def test_product_with_scrap_behind_the_rows(library, c_in, c_out):
    weight = torch.randn(c_out, 3, c_in)[:, 1].t()  # with gaps, as one offset of a kernel has them
    for n_rows in ROWS:
        x = torch.full((-(-n_rows // host_products.STEP) * host_products.STEP, c_in), float("nan"))
        x[:n_rows] = torch.randn(n_rows, c_in)
        out = torch.full((n_rows, c_out), float("nan"))
        host_products.mm(x, weight, out=out)
        close(out, x[:n_rows].double() @ weight.double())
        host_products.mm(x[:n_rows], weight, out=out.fill_(float("nan")))
        close(out, x[:n_rows].double() @ weight.double())


@pytest.mark.parametrize("c_in, c_out", [(33, 5), (64, 64)])
def test_transposed_product_adds_up(library, c_in, c_out):
    for n_rows in ROWS:
        room = -(-n_rows // host_products.STEP) * host_products.STEP
        left, right = torch.full((room, c_in), float("nan")), torch.full((room, c_out), torch.inf)
        left[:n_rows], right[:n_rows] = torch.randn(n_rows, c_in), torch.randn(n_rows, c_out)
        before = torch.randn(c_in, c_out)
        total = before.clone()
        host_products.add_transposed(total, left, right, n_rows)
        expected = before.double() + left[:n_rows].double().t() @ right[:n_rows].double()
        close(total, expected, n_rows)


def test_a_layers_own_rows_are_not_written(library):
    """Autograd counts writes of no rows, too, and refuses the features that it has kept."""
    for n_rows in ROWS:
        left, right = torch.randn(n_rows, 64), torch.randn(n_rows, 64)
        host_products.add_transposed(torch.zeros(64, 64), left, right, n_rows)
        assert (left._version, right._version) == (0, 0), n_rows


@pytest.mark.parametrize("n_rows", [511, 512, 3584, 4096])
def test_gradients_reach_what_autograd_has_kept(library, n_rows):
    """Of rows that fill whole steps of oneDNN, behind a ReLU whose result is kept."""
    cells = torch.arange(n_rows)
    coords = torch.stack([0 * cells, cells // 256, cells // 16 % 16, cells % 16], 1).int()
    kmap = functional.submanifold(
        functional.coordinate_map(coords, (16, 16, 16), 1), functional.kernel_offsets((3, 3, 3))
    )
    weight = torch.randn(27, 64, 64, requires_grad=True)
    x = torch.randn(n_rows, 64, requires_grad=True)
    functional.conv(x.relu(), weight, None, kmap).square().mean().backward()
    assert torch.isfinite(x.grad).all() and weight.grad.abs().sum() > 0


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("c_in, c_out", [(1, 1), (4, 16), (33, 7), (64, 20), (512, 64)])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_row_has_the_same_bits_whatever_is_beside_it(threads, c_in, c_out, dtype, turned):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        w = torch.randn(c_out, c_in, dtype=dtype).t() if turned else torch.randn(c_in, c_out, dtype=dtype)
        x = torch.randn(3000, c_in, dtype=dtype)
        many = host_products.mm(x, w, out=x.new_empty(3000, c_out))
        many_linear = host_products.linear(x, w)
        for first, last in ((0, 1), (5, 7), (100, 117), (0, 16), (7, 70), (2001, 2400), (1, 3000)):
            y = host_products.mm(x[first:last], w, out=x.new_empty(last - first, c_out))
            assert torch.equal(y, many[first:last])
            assert torch.equal(host_products.linear(x[first:last], w), many_linear[first:last])
            height = host_products.height_of(last - first, w)
            if len(x) - first >= height:  # filled up with what comes after
                y = host_products.mm(x[first:], w, out=x.new_empty(height, c_out))
                assert torch.equal(y[: last - first], many[first:last])
    finally:
        torch.set_num_threads(before)


def test_other_memory_takes_torch(rules, monkeypatch):
    def refuse():
        raise AssertionError("oneDNN is for dense fp32 rows")

    rules.set(host_products, _PAYS=1)
    x, w = torch.randn(600, 8, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    assert not host_products.by_onednn(w)
    monkeypatch.setattr(host_products, "onednn", refuse)
    close(host_products.mm(x, w, out=torch.empty(600, 4, dtype=torch.float64)), x @ w)


def test_the_defaults_of_the_caller_do_not_matter(rules):
    """The library is chosen by fp32 products on the CPU, whatever tensors are made by default."""
    rules.set(host_products, _PAYS=1)
    x, w, out = torch.randn(600, 32), torch.randn(32, 16), torch.empty(600, 16)
    host_products.reset()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.inference_mode():
            host_products.mm(x, w, out=out)
    finally:
        torch.set_default_dtype(torch.float32)
        host_products.reset()
    close(out, x.double() @ w.double())


@pytest.mark.parametrize("columns", [1, 4, 5])
@pytest.mark.parametrize("strided", [False, True])
def test_rows_are_gathered_whatever_their_width_and_memory(columns, strided):
    x = torch.randn(50, 2 * columns)[:, ::2] if strided else torch.randn(50, columns)
    x.requires_grad_()
    rows, room = torch.randint(0, 50, (30,), dtype=torch.int32), torch.zeros(40, columns)
    with torch.no_grad():
        host_products.gather_rows(x, rows, room[:30])
    assert torch.equal(room[:30], x.detach()[rows.long()])
    assert not room[30:].any()
