"""What a time of the CPU suite counts."""

from __future__ import annotations

import time

import torch

from benchmarks import measure
from benchmarks.works import Work


def test_cpu_time_leaves_out_what_others_take():
    def waits():
        time.sleep(0.05)  # the processor is somebody else's
        return torch.zeros(1)

    work, device = Work(waits, lambda: None), torch.device("cpu")
    wall = measure.times(work, device, 0.0, settle=False)
    alone = measure.times(work, device, 0.0, settle=False, clock=time.process_time)
    assert len(wall) == len(alone) == 1 and wall[0] > 45 and alone[0] < wall[0] / 2
