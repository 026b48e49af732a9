"""The timer that layers carry along."""

import contextlib


class CUDAKernelTimer:
    """Accepted everywhere spconv takes one; records nothing (use torch.profiler)."""

    def __init__(self, enable=True):
        self.enable = enable
        self._timer = None

    @contextlib.contextmanager
    def namespace(self, name):
        yield

    @contextlib.contextmanager
    def record(self, name, stream=0):
        yield

    def get_all_pair_time(self):
        return {}

    @staticmethod
    def collect_by_name(name, res):
        """Entries of a timing dictionary whose dotted name contains `name`."""
        return {key: value for key, value in res.items() if name in key.split(".")}
