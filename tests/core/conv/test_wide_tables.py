"""Tables with room for more rows than a map has are read in place."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge import settings
from sparse_bridge.core import functional
from sparse_bridge.core.maps.kernel_map import KernelMap
from sparse_bridge.core.maps.rulebook import Rulebook
from sparse_bridge.kernels.maps.neighbor_table import NeighborTable
from tests.checks import assert_close
from tests.core.layers import layer, tensors


def wide(device, kind="strided", room=37):
    """(a layer, its map over such a table, the memory of that). Behind the last row: nonsense."""
    made = layer(kind, 2)
    book = made.kmap.rulebook
    n_rows, n_in = book.n_rows
    memory = torch.full((book.n_offsets, n_rows + room), 1 << 30, dtype=torch.int32)
    memory[:, :n_rows] = book.table(0)[0].nbr
    memory, count = memory.to(device), torch.tensor([n_rows - 1], dtype=torch.int32, device=device)
    views = NeighborTable(memory, None, count), None
    symmetric = {"symmetric": book.symmetric, "center": book.center}
    return made, KernelMap(Rulebook(n_in, n_rows, book.n_offsets, memory.device, views=views, **symmetric)), memory


@pytest.mark.interpreted
@pytest.mark.emulated
@pytest.mark.parametrize("kind", ["strided", "submanifold"])
def test_products_read_the_table_where_it_is(kernel_lane, kind):
    made, kmap, memory = wide(kernel_lane.device, kind)
    x, weight, bias, _ = tensors(made, 6, 10)
    with torch.no_grad(), kernel_lane.serving(torch.float32), settings.override(dataflow="unmasked"):
        y = functional.conv(*(t.to(kernel_lane.device) for t in (x, weight, bias)), kmap)
    assert_close(y, made.truth(x, weight, bias))
    found, backwards = kmap.rulebook.neighbors(0)
    assert not backwards and found.data_ptr() == memory.data_ptr()
    assert found.stride(0) == memory.shape[1] and found.shape[1] == kmap.rulebook.n_rows[0]


def test_other_readers_get_a_table_without_gaps():
    _, kmap, memory = wide("cpu")
    before, _ = kmap.rulebook.neighbors(0)
    table, _ = kmap.rulebook.table(0)
    assert table.nbr.is_contiguous() and table.count is None
    assert torch.equal(table.nbr, before) and table.nbr.data_ptr() != memory.data_ptr()
    assert kmap.rulebook.neighbors(0)[0] is table.nbr
    full = Rulebook(5, before.shape[1], len(before), before.device, views=(table, None))
    assert full.neighbors(0)[0] is table.nbr


def test_the_side_of_a_symmetric_map_that_is_not_there():
    _, kmap, memory = wide("cpu", "submanifold")
    found, backwards = kmap.rulebook.neighbors(1)
    assert backwards and found.data_ptr() == memory.data_ptr()
