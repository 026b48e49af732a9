"""The timer that layers carry along."""

from contextlib import nullcontext as nullcontext

from spconv.cppconstants import CPU_ONLY_BUILD as CPU_ONLY_BUILD

from sparse_bridge.adapters.spconv.upstream.tensorview import KernelTimer


class CUDAKernelTimer(KernelTimer):
    """GPU times by name; does nothing where disabled or without a GPU."""

    def __init__(self, enable=True):
        super().__init__(enable)
