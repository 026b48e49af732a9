"""Parts of memory are what views of it would be."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from sparse_bridge.kernels.runtime import parts
from sparse_bridge.kernels.runtime.parts import Part, Slab, allocate_part, memory_for, memory_of, viewed

CPU = torch.device("cpu")
MEMORY = torch.arange(64, dtype=torch.int32)

VIEWS = [
    (Part(MEMORY, 3, (5,)), MEMORY[3:8]),
    (Part(MEMORY, 4, (2, 3)), MEMORY[4:10].view(2, 3)),
    (Part(MEMORY, 5, (4,), step=2), MEMORY[5:12:2]),
    (Part(MEMORY, 8, (3,), torch.int64), MEMORY[8:14].view(torch.int64)),
    (Part(MEMORY[8:], 2, (2,)), MEMORY[10:12]),
    (Part(MEMORY[8:16].view(torch.int64), 1, (3, 2), torch.int32), MEMORY[10:16].view(3, 2)),
    (Part(MEMORY, 7, (0, 4)), MEMORY[7:7].view(0, 4)),
]


@pytest.mark.parametrize("part, view", VIEWS)
def test_a_part_is_its_view(part, view):
    assert torch.equal(part.view(), view) and part.view().stride() == view.stride()
    assert part.view() is viewed(part) and viewed(7) == 7 and viewed(view) is view
    assert part.shape == view.shape and part.dtype == view.dtype
    assert part.data_ptr() == MEMORY.data_ptr() + 4 * view.storage_offset() * view.itemsize // 4
    assert memory_of(part).untyped_storage().data_ptr() == MEMORY.data_ptr()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_lies_elsewhere(copied):
    memory = MEMORY.clone()
    one, other = copied([Part(memory, 4, (2, 3)), Part(memory, 12, (4,))])
    assert one.memory is other.memory and one.memory is not memory
    assert one.data_ptr() == one.view().data_ptr() and one.view()[0, 0] == 4
    assert other.data_ptr() - one.data_ptr() == 32


def test_parts_of_a_room_are_aligned_and_do_not_overlap():
    slab = Slab(Slab.rounded(10) + Slab.rounded(3) + 4, CPU, fill=-1)
    parts = [slab.part(2, 5), slab.part(3), slab.part(4)]
    assert all(part.data_ptr() % 16 == 0 and (part.view() == -1).all() for part in parts)
    for number, part in enumerate(parts):
        part.view().fill_(number)
    assert [part.view().unique().tolist() for part in parts] == [[0], [1], [2]]
    with pytest.raises(RuntimeError, match="taken"):
        slab.part(1)


def test_without_a_room_memory_is_taken():
    made = allocate_part(None, CPU, 3, 2, fill=7)
    assert made.view().tolist() == [[7, 7]] * 3
    assert Slab.or_none(0, CPU) is None and Slab.or_none(1 << 40, CPU) is None


def test_large_memory_comes_in_few_sizes(fake_gpu):
    """What a scene has freed serves one that is a little larger."""
    large = 2 << 20
    assert [len(memory_for(size, CPU)) for size in (0, 5, large - 1)] == [0, 5, large - 1]
    sizes = [large + step * 12_345 for step in range(500)]
    found = [len(memory_for(size, torch.device("meta"))) for size in sizes]
    assert all(size <= length <= size * 1.25 for size, length in zip(sizes, found, strict=True))
    assert found == sorted(found) and len(set(found)) == 9  # two octaves, and their ends
    fake_gpu.has(captures=lambda device: True)
    assert len(memory_for(large + 1, CPU)) == large + 1


def test_a_large_slab_holds_its_parts_and_its_filling():
    slab = Slab(size := (2 << 20) + 4, CPU, fill=-1)
    part = slab.part(size).view()
    assert part.shape == (size,) and bool((part == -1).all())
    with pytest.raises(RuntimeError, match="are taken"):
        slab.part(4)


def test_small_neighbours_share_a_memory(rules):
    rules.set(parts, _SHARED=1000)
    sizes = [5, 100, 0, 400, 900, 3, 2000, 7, 7]
    made = parts.memories_for(sizes, CPU)
    assert [one.shape[0] >= size for one, size in zip(made, sizes, strict=True)] == [True] * 9
    assert all(one.dtype == torch.int32 and one.is_contiguous() for one in made)
    bases = [one.untyped_storage().data_ptr() for one in made]
    assert [bases.index(base) for base in bases] == [0, 0, 0, 0, 4, 4, 6, 7, 7]
    assert all(one.storage_offset() % 32 == 0 for one in made)
    for number, one in enumerate(made):
        one.fill_(number)
    assert all((one == number).all() for number, one in enumerate(made))
    assert [len(one) for one in parts.memories_for([], CPU)] == []
