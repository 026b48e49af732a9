"""Tuning in a process group: none where there are several ranks."""

from __future__ import annotations

import torch

from tests.patience import PATIENCE

from .tuning import Work, blocking, fastest, fork, here, needs_fork, problem, tile, tuning, winner


def _rank(connection, place, rank):
    """A rank that meets a problem nobody has tuned, then one that is stored."""
    work, world = Work(), torch.distributed
    world.init_process_group("gloo", store=world.FileStore(f"{place}/store", 2), rank=rank, world_size=2)
    one, other = problem(), problem(c=128)
    fastest(one, work)
    here(place).store("fwd", str(other.bucket()), winner(block_n=16))
    with tuning("full", place):
        found = blocking(work)
        tiles = [found.tile_for(each, work.trial()) for each in (one, other)]
    connection.send((tiles, len(work.timed)))
    world.barrier()
    world.destroy_process_group()


@needs_fork
def test_ranks_time_nothing_and_choose_alike(tmp_path):
    """A rank that tunes would keep the others waiting, and could end with another tile."""
    started = [fork(_rank, tmp_path, rank) for rank in range(2)]
    for child, connection in started:
        assert connection.poll(PATIENCE)
        assert connection.recv() == ([problem(c=64).default(), tile(block_n=16)], 0)
        child.join(PATIENCE)


def test_a_process_group_of_one_tunes(tmp_path):
    world, work = torch.distributed, Work()
    best = fastest(problem(), work)
    world.init_process_group("gloo", store=world.HashStore(), rank=0, world_size=1)
    try:
        with tuning("full", tmp_path):
            assert blocking(work).tile_for(problem(), work.trial()) == best
    finally:
        world.destroy_process_group()
