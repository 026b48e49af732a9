"""Which steps of a package wait for which, and which arguments a kernel writes through."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from sparse_bridge.export.player.dependencies import Access, edges
from sparse_bridge.export.player.kernel_writes import BEHIND_TABLES, code_of, written_arguments
from sparse_bridge.export.player.record import target_of
from sparse_bridge.export.player.stand_in import driving

triton = pytest.importorskip("triton")
tl = triton.language


@triton.jit
def _kernel(read, n, written, added, maybe, table, behind, looped):
    row = tl.program_id(0) * 16 + tl.arange(0, 16)
    value = tl.load(read + row, row < n, 0)
    tl.store(written + row, value)
    tl.atomic_add(added + 1, n)
    if n > 7:
        tl.atomic_cas(maybe, 0, 1)
    place = tl.load(table).to(tl.pointer_type(tl.int32))
    tl.store(place + row, tl.load(behind + row))
    for _ in range(n):
        tl.store(looped, n)
        looped += 4


def conflict(one, other):
    return any(
        a.start < b.stop and b.start < a.stop and (a.writes or b.writes) for a, b in itertools.product(one, other)
    )


@pytest.mark.parametrize("seed", range(20))
def test_steps_that_share_bytes_are_in_order(seed):
    """Against all pairs; and no edge follows from others."""
    draw = random.Random(seed)
    steps = []
    for _ in range(40):
        starts = [draw.randrange(0, 120) for _ in range(draw.randrange(0, 4))]
        steps.append([Access(start, start + draw.randrange(1, 12), draw.random() < 0.4) for start in starts])
    found = edges(steps)
    assert found == sorted(found, key=lambda edge: edge[1])

    def closure(pairs):
        before = [set() for _ in steps]
        for earlier, later in pairs:
            before[later] |= {earlier} | before[earlier]
        return before

    wanted = closure((a, b) for b in range(len(steps)) for a in range(b) if conflict(steps[a], steps[b]))
    assert closure(found) == wanted
    for edge in found:
        assert closure(other for other in found if other != edge) != wanted


@pytest.mark.parametrize("target", ["cuda:87", "hip:gfx942"])
def test_what_a_kernel_writes(target):
    heard = []

    class Listener:
        def launched(self, compiled, grid, args):
            heard.append((compiled, [kind for kind, _ in args]))

    own = target_of(target)
    with driving(own, Listener()):
        x, table = torch.zeros(64, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
        _kernel[(4,)](x, 20, x, x, x, table, x, x)
    (compiled, types), *_ = heard
    code = code_of(compiled.metadata)
    assert written_arguments(code, types) == {2, 3, 4, 7, BEHIND_TABLES}
    everything = {BEHIND_TABLES, 0, 2, 3, 4, 5, 6, 7}
    for unknown in (None, "", "module {}", code + code, code.replace("tt.load", "tt.some_day")):
        assert written_arguments(unknown, types) == everything
