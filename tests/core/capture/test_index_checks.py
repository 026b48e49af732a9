"""Which operators of torch would read or write outside of a tensor."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sparse_bridge.core.capture.calls.index_checks import IndexChecks
from sparse_bridge.refusals import Refusal

X, ROWS = torch.zeros(4, 6), torch.ones(4, 6, dtype=torch.int64)
OPERATORS = {
    "embedding": (lambda i: F.embedding(i, X), 0, 3),
    "index": (lambda i: X[i], -4, 3),
    "index of a later axis": (lambda i: X[:, i], -6, 5),
    "index behind a mask": (lambda i: X[:, None].expand(4, 4, 6)[X[:, 0] == 0, i], -4, 3),
    "index_put_": (lambda i: X.clone().index_put_((i,), torch.ones(1, 6)), -4, 3),
    "index_select": (lambda i: X.index_select(1, i.flatten()), 0, 5),
    "gather": (lambda i: X.gather(0, i.expand(4, 6)), 0, 3),
    "scatter_": (lambda i: X.clone().scatter_(1, i.expand(4, 6), 1.0), 0, 5),
    "scatter_add": (lambda i: X.scatter_add(0, i.expand(4, 6), X), 0, 3),
    "scatter_reduce": (lambda i: X.scatter_reduce(0, i.expand(4, 6), X, "amax"), 0, 3),
    "index_add_": (lambda i: X.clone().index_add_(0, i.flatten()[:1], X[:1]), 0, 3),
    "index_copy": (lambda i: X.index_copy(0, i.flatten()[:1], X[:1]), 0, 3),
    "index_fill": (lambda i: X.index_fill(1, i.flatten(), 2.0), 0, 5),
    "take": (lambda i: X.take(i), -24, 23),
    "nll_loss": (lambda i: F.nll_loss(X, i.flatten().expand(4)), 0, 5),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_index_out_of_range(name):
    operator, least, most = OPERATORS[name]
    with IndexChecks({}, []):
        for index in (least, most):
            operator(torch.tensor([index]))
        for index in (least - 1, most + 1, -(1 << 63)):
            with pytest.raises(Refusal, match="GRAPH_INDEX"):
                operator(torch.tensor([index]))


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 1.1, float("nan")])
def test_shares(share):
    x, within = torch.full((3,), share), 0 <= share <= 1
    for operator in (lambda: F.binary_cross_entropy(x, torch.ones(3)), lambda: torch.bernoulli(x)):
        with IndexChecks({}, []):
            if within:
                operator()
            else:
                with pytest.raises(Refusal):
                    operator()
    with IndexChecks({}, []):
        F.dropout(torch.full((3,), 7.0), 0.5)
        F.nll_loss(X, torch.tensor([0, 5, -100, 1]))


WHOLE = {
    "slice": lambda x: x[:, 1:3],
    "all": lambda x: x[:][: len(x)],
    "select": lambda x: x[:, 0],
    "split": lambda x: x.split(len(x)),
    "chunk": lambda x: x.chunk(2, 1),
    "unbind": lambda x: x.unbind(1),
    "view": lambda x: x.view(-1, 2, 2).flatten(1).view(2 * len(x), 2).view(1, -1, 4),
    "unfold": lambda x: x.unfold(1, 2, 1),
    "any": lambda x: (x > 0).any(1),
    "all of each": lambda x: (x > 0)[None].all(dim=-1),
    "sum": lambda x: [(x > 0).sum(1), x.sum(0), x.amax()],
    "count_nonzero": lambda x: x.count_nonzero(1),
}
PARTS = {
    "slice": lambda x: x[:3],
    "longer slice": lambda x: x[:100],
    "last": lambda x: x[-3:],
    "step": lambda x: x[::2],
    "later axis": lambda x: x.t()[None, :, :3],
    "narrow": lambda x: x.narrow(0, 0, 3),
    "narrow_copy": lambda x: torch.narrow_copy(x, 0, 0, 3),
    "assignment": lambda x: x.__setitem__(slice(3), 0.0),
    "select": lambda x: x[2],
    "unbind": lambda x: list(x),
    "split": lambda x: x.split(3),
    "longer split": lambda x: x.split(100),
    "sizes": lambda x: x.split([3, 9]),
    "chunk": lambda x: x.chunk(2),
    "tensor_split": lambda x: x.tensor_split(3),
    "view": lambda x: x.view(-1, 8),
    "reshape": lambda x: x.reshape(-1, 8),
    "unflatten": lambda x: x.unflatten(0, (-1, 2)),
    "unfold": lambda x: x.unfold(0, 2, 1),
}
COMPARED = {
    "any": lambda x: (x > 0).any(0),
    "any at all": lambda x: (x > 0).any(),
    "all": lambda x: (x > 0)[None].all(dim=-2),
    "all axes": lambda x: (x > 0).all(dim=(0, 1)),
    "sum": lambda x: (x > 0).sum(),
    "largest": lambda x: (x > 0).amax(0),
    "count_nonzero": lambda x: x.count_nonzero(),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_rows(name):
    x, weight = torch.zeros(12, 4), torch.zeros(12, 4)
    with IndexChecks({0: 100, 1: 12}, [weight]):
        WHOLE.get(name, WHOLE["all"])(x)
        PARTS[name](weight)
        with pytest.raises(Refusal, match="GRAPH_SLICE"):
            PARTS[name](x)
    with IndexChecks({0: 7}, []):
        PARTS[name](x)


@pytest.mark.parametrize("name", COMPARED)
def test_what_holds_for_all_rows(name):
    x = torch.zeros(12, 4)
    with IndexChecks({0: 100, 1: 12}, []):
        WHOLE.get(name, WHOLE["all"])(x)
        with pytest.raises(Refusal, match="GRAPH_SLICE"):
            COMPARED[name](x)
    with IndexChecks({0: 7}, []):
        COMPARED[name](x)
