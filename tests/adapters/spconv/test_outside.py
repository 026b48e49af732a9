"""Rows outside of the grid: they meet nothing but themselves, and one warning says so."""

from __future__ import annotations

import warnings

import pytest
import torch

from sparse_bridge import log
from sparse_bridge.adapters.spconv.rules import outside
from sparse_bridge.core.geometry.outside import OutsideLook
from sparse_bridge.kernels.runtime.fetched import Fetched


@pytest.fixture(autouse=True)
def unwarned():
    for reset in (outside.reset, log.reset):
        reset()
    yield
    outside.reset()


def tensor(sp, rows, shape=(4, 4, 4), batch_size=1):
    rows = torch.tensor(rows, dtype=torch.int32)
    return sp.SparseConvTensor(torch.ones(len(rows), 1), rows, list(shape), batch_size)


def counts(sp, x, **options):
    """How many rows each row meets."""
    layer = sp.SubMConv3d(1, 1, 3, bias=False, **options)
    torch.nn.init.ones_(layer.weight)
    return layer(x).features[:, 0].tolist()


def warned(run):
    """The messages of what `run` warns of, at a line of this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    assert all(one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught if issubclass(one.category, RuntimeWarning)]


BORDER = [[0, 1, 1, 1], [0, 1, 1, 2], [0, 1, 1, 3], [0, 1, 2, 3]]


def test_a_grid_that_is_one_too_small(sp):
    x = tensor(sp, BORDER, (3, 3, 3))
    assert warned(lambda: counts(sp, x)) == [
        "row 2 of a SparseConvTensor is at [1, 1, 3] in batch item 0, outside of its grid "
        "[3, 3, 3] with 1 batch items (2 rows are outside). Such rows meet nothing but themselves; "
        "spconv takes them for other cells. Pass a larger spatial_shape (maximum + 1) or "
        "batch_size, or correct the indices."
    ]
    assert counts(sp, x) == [2, 2, 1, 1]
    again = tensor(sp, BORDER, (3, 3, 3))
    assert not warned(lambda: counts(sp, again)), "once is enough"


@pytest.mark.parametrize("row", [[0, -1, 1, 1], [0, 1, 1, 4], [0, 9, 9, 9], [2, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("kind", ["SubMConv3d", "SparseConv3d", "SparseMaxPool3d"])
def test_every_side_and_layer(sp, kind, row):
    x = tensor(sp, [[0, 1, 1, 1], row], batch_size=2)
    layer = getattr(sp, kind)(*((2, 2) if "Pool" in kind else (1, 1, 3)))
    (text,) = warned(lambda: layer(x))
    assert f"row 1 of a SparseConvTensor is at {row[1:]} in batch item {row[0]}" in text


def test_rows_that_are_dead_on_purpose(sp):
    """And those of layers, which lie inside."""
    x = tensor(sp, [[-1, 0, 0, 0], *BORDER, [-1, 9, 9, 9]])
    assert not warned(lambda: counts(sp, x))
    assert counts(sp, x)[1:-1] == [2, 4, 3, 3]
    inside = tensor(sp, BORDER)
    down = sp.SparseConv3d(1, 1, 3, 2)
    assert not warned(lambda: sp.SubMConv3d(1, 1, 3)(down(inside)))


def test_padded_scenes_are_looked_at_a_few_times(sp, calls_of):
    looks = calls_of(OutsideLook, "__init__")
    for _ in range(20):
        counts(sp, tensor(sp, [[-1, 0, 0, 0], [0, 1, 1, 1]]))
    assert len(looks) == 8


def test_the_device_is_not_waited_for(standin, monkeypatch):
    """What is on its way is read when a later map is built."""
    done = []
    monkeypatch.setattr(Fetched, "ready", property(lambda self: bool(done)))
    monkeypatch.setattr(Fetched, "read", lambda self: done[0] and [[1, 7, 0, 1, 1, 3]])
    x = tensor(standin, BORDER, (3, 3, 3))
    assert not warned(lambda: counts(standin, x)) and not warned(lambda: counts(standin, x))
    done.append(True)
    (text,) = warned(lambda: counts(standin, x, dilation=2))
    assert text.startswith("row 7 of a SparseConvTensor is at [1, 1, 3]")
