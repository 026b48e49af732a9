"""A layer's product under a limit on memory: in one piece where that fits, also by dropping maps
that can be built again; else in the largest blocks of rows that do."""

from __future__ import annotations

import torch

from ...device import memory_use
from ...maps.rulebook import Rulebook
from ..dataflow import Dataflow, Gather, LayerProduct
from ..dataflows.per_offset import PerOffset
from ..epilogue import Epilogue
from ..kernel_products import GatherProduct, KernelDataflow
from ..torch_end import Finished
from .job import Call, Job
from .kernel_job import KernelJob, SearchJob
from .torch_job import TorchJob

LEAST = 256  # rows of a block: two pairs of tiles


class LimitedProduct:
    """A `Gather` that keeps to the limit in force."""

    __slots__ = ("_flow", "_inner", "_product")

    def __init__(self, flow: Dataflow, product: LayerProduct, inner: Gather) -> None:
        self._flow, self._product, self._inner = flow, product, inner

    def __call__(
        self, rulebook: Rulebook, side: int, x: torch.Tensor, weight: torch.Tensor, end: Epilogue
    ) -> torch.Tensor:
        # a graph has its own memory
        limit = memory_use.limit_on(x.device) if rulebook.rows[side].device is None else None
        if limit is None:
            return self._inner(rulebook, side, x, weight, end)
        memory_use.use(rulebook)
        call = Call(rulebook, side, x, weight, end)
        jobs = self._jobs(call)
        one_piece, result = jobs[0], call.n_rows * jobs[0].columns * jobs[0].size

        def total(n_bytes: int) -> int:
            return memory_use.in_use(x.device, *call.operands) + result + n_bytes

        if memory_use.drop_others(x.device, lambda: total(one_piece.one_piece()) <= limit, rulebook):
            return self._inner(rulebook, side, x, weight, end)
        size, heights = total(one_piece.one_piece()), _heights(call.n_rows)
        least = size
        for job in jobs:
            if not job.divisible:
                continue
            most = total(job.views()) - result, total(job.growth() + job.block(heights[-1]))
            if max(most) <= min(limit, size):
                job.prepare()
                fitting = (height for height in heights if total(job.block(height)) <= limit)
                height = next(fitting, heights[-1])
                y = x.new_empty((call.n_rows, job.columns))
                job.fill(y, height)
                return y
            least = min(least, max(most))
        raise memory_use.refusal(_named(call, one_piece), limit, size, least)

    def _jobs(self, call: Call) -> list[Job]:
        """Ways to compute it, the quickest first."""
        flow, inner = self._flow, self._inner
        if isinstance(flow, KernelDataflow) and not flow.irregular:
            assert isinstance(inner, GatherProduct | Finished)
            job_classes = [KernelJob, SearchJob] if SearchJob.serves(call) else [KernelJob]
            return [job_class(flow, self._product, inner, call) for job_class in job_classes]
        job_class = TorchJob if isinstance(flow, PerOffset) else Job
        return [job_class(self._product, inner, call)]


def _heights(n_rows: int) -> list[int]:
    """Rows of blocks that are tried: half as many each time, whole tiles."""
    heights: list[int] = []
    n_blocks = 2
    while not heights or heights[-1] > LEAST:
        height = -(-n_rows // n_blocks)
        heights.append(max(LEAST, height + -height % LEAST))
        n_blocks *= 2
    return heights


def _named(call: Call, job: Job) -> str:
    columns, dtype = job.product.w.columns_in, str(call.x.dtype).removeprefix("torch.")
    return f"a convolution of {call.x.shape[0]} x {columns} to {call.n_rows} x {job.columns} values in {dtype}"
