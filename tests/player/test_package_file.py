"""The file `model.sbp`, written and read in Python."""

from __future__ import annotations

import itertools
import pathlib
import random
import zlib

import pytest

from sparse_bridge.export import ExportError
from sparse_bridge.export.player import memory_plan, package_file
from sparse_bridge.export.player.merged_fills import merged_fills

from .networks import tiny


def test_what_is_written_is_read():
    programs = [tiny("cuda:87"), tiny("hip:gfx942")]
    content = package_file.content_of(programs)
    assert package_file.read(content) == programs


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "model.sbp"
    package_file.write(path, [tiny()])
    before = path.read_bytes()

    def full(self, content):
        self.open("wb").close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        package_file.write(path, [tiny("hip:gfx942")])
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_code_and_weights_of_several_targets_are_kept_once():
    one, two = (len(package_file.content_of([tiny()] * n)) for n in (1, 2))
    assert two - one < 1024  # records alone


def test_damage_is_noticed():
    content = package_file.content_of([tiny()])
    with pytest.raises(ExportError, match="no package"):
        package_file.read(b"PK" + content)
    with pytest.raises(ExportError, match="version 7"):
        package_file.read(content[:8] + (7).to_bytes(4, "little") + content[12:])
    for at in (16, 100, len(content) - 1):
        damaged = bytearray(content)
        damaged[at] ^= 4
        with pytest.raises(ExportError, match="checksum"):
            package_file.read(bytes(damaged))
    with pytest.raises(ExportError, match="cut short"):
        package_file.read(content[:-1])
    assert zlib.crc32(content[16:]) == int.from_bytes(content[12:16], "little")


@pytest.mark.parametrize("seed", range(20))
def test_what_lives_at_the_same_time_does_not_overlap(seed):
    rng = random.Random(seed)
    lives = [memory_plan.Life(rng.randint(0, 9000), *sorted(rng.choices(range(40), k=2))) for _ in range(60)]
    planned = memory_plan.plan(lives)
    places = list(zip(lives, planned.offsets, strict=True))
    for index, (a, at) in enumerate(places):
        assert at % memory_plan.ALIGNED == 0 and at + a.size <= planned.size
        for b, other in places[:index]:
            apart = at + a.size <= other or other + b.size <= at
            assert apart or a.end < b.begin or b.end < a.begin
    at_once = max(sum(life.size for life in lives if life.begin <= step <= life.end) for step in range(40))
    assert at_once <= planned.size < 2 * at_once + 256 * 60


@pytest.mark.parametrize("seed", range(20))
def test_groups_lie_one_behind_another(seed):
    rng = random.Random(seed)
    lives = [memory_plan.Life(rng.randint(0, 9000), *sorted(rng.choices(range(40), k=2))) for _ in range(60)]
    groups = [[7, 3, 50], [0, 59], [20, 21, 22, 23, 24, 25]]
    planned = memory_plan.plan(lives, groups)
    for group in groups:
        for one, other in itertools.pairwise(group):
            size = -(-max(1, lives[one].size) // memory_plan.ALIGNED) * memory_plan.ALIGNED
            assert planned.offsets[other] == planned.offsets[one] + size
    places = list(zip(lives, planned.offsets, strict=True))
    for index, (a, at) in enumerate(places):
        for b, other in places[:index]:
            assert at + a.size <= other or other + b.size <= at or a.end < b.begin or b.end < a.begin


def fills(*sizes, value=0):
    return [package_file.Step(package_file.FILL, value=value, to=i << 48, size=size) for i, size in enumerate(sizes)]


def test_fills_are_one_unless_that_takes_memory():
    steps = [*fills(1000, 300), package_file.Step(package_file.FILL, value=7, to=2 << 48, size=512), *[None] * 3]
    steps[3:] = [step._replace(to=3 + i << 48) for i, step in enumerate(fills(4096, 4096, 64))]
    lives = {i: memory_plan.Life(step.size, i, i + 1) for i, step in enumerate(steps)}
    begins = {i: i for i in range(6)}
    merged = merged_fills(steps, lives, begins)
    # The last would lie beside both of 4096, which share a place otherwise.
    assert merged.groups[0][:2] == [0, 1] and [2] in merged.groups
    assert merged.steps[0] == 0 and merged.steps[1] is None and 2 not in merged.steps
    assert merged.lives[1].begin == 0 and all(merged.lives[i] == lives[i] for i in (0, 2))
    whole = memory_plan.plan(list(lives.values()))
    groups = [group for group in merged.groups if len(group) > 1]
    assert memory_plan.plan([merged.lives[i] for i in range(6)], groups).size <= whole.size
    assert merged_fills(steps, lives, {**begins, 1: 0}).steps.get(1, 1) == 1  # it has been used before
    short = [steps[0], steps[1]._replace(size=100), *steps[2:]]
    assert merged_fills(short, lives, begins).steps.get(1, 1) == 1  # a part of it


def test_a_chain_takes_the_memory_of_two():
    lives = [memory_plan.Life(1024, step, step + 1) for step in range(10)]
    assert memory_plan.plan(lives).size == 2048


@pytest.mark.parametrize("block", [1, 2 << 20, 234 << 20])
def test_memory_has_room_for_kernels(block):
    """On an H200 six networks took up to 3 MiB beside the block, kernels of up to 3 MiB in files included."""
    sizes = [159_400, 21_000, 900]
    memory = memory_plan.needed(block, sizes)
    assert block + sum(sizes) + (3 << 20) <= memory <= block + sum(sizes) + (6 << 20)
    assert memory_plan.needed(block, sizes * 30) - memory == 4 << 20  # 5.3 MB of code, by pages
