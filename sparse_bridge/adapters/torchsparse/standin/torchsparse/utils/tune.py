"""Tuning of the original's own kernels, which are not used here, and the time of layers."""

import statistics
import time

import torch
from torchsparse.nn.modules.conv import Conv3d

from sparse_bridge.adapters.torchsparse.profile import bind
from sparse_bridge.errors import ContractError
from sparse_bridge.log import warn

__all__ = ["StableTimeAccumulator", "profile_model", "tune"]


_NAMES = (
    "n_samples",
    "collect_fn",
    "enable_fp16",
    "save_dir",
    "tune_tag",
    "force_retune",
    "dataflow_range",
    "dataflow_prune",
    "tune_with_bwd",
    "verbose",
    "skip_warning",
    "kmap_mode",
    "tune_id",
)
"""Of 2.1, and two more of 2.0."""


def tune(model, data_loader, *args, **kwargs):
    """Accepts what the original takes, warns, and leaves the model as it is: kernels here choose
    themselves."""
    bind("tune", _NAMES, args, kwargs)
    warn("torchsparse.tune does nothing in sparse_bridge: kernels choose themselves.", UserWarning)


class StableTimeAccumulator:
    """Times, of which the quickest and the slowest quarter do not count."""

    def __init__(self):
        self.times = []

    def update(self, seconds):
        """Add a time."""
        self.times.append(float(seconds))

    def __len__(self):
        return len(self.times)

    @property
    def mean(self):
        """Of the middle half. Raises ContractError without times."""
        if not self.times:
            raise ContractError("there are no times yet; call update(seconds).")
        upper = sorted(self.times)[len(self.times) // 4 :]
        return statistics.fmean(upper[: len(upper) - len(self.times) // 4])


def profile_model(model, data_loader, n_samples=100, collect_fn=None, enable_fp16=False):
    """Seconds of every `Conv3d` of a model, by its name: {name: StableTimeAccumulator}.

    data_loader: batches, of which `n_samples` are run without gradients.  collect_fn: makes the
    model's input of a batch.  enable_fp16: with the model and its inputs in half precision. The
    device is waited for around every layer.
    """
    times = {name: StableTimeAccumulator() for name, m in model.named_modules() if isinstance(m, Conv3d)}
    begins, handles = {}, []

    def wait(x):
        if x.feats.is_cuda:
            torch.cuda.synchronize(x.feats.device)
        return time.perf_counter()

    def start_timer(name):
        return lambda module, inputs: begins.__setitem__(name, wait(inputs[0]))

    def stop_timer(name):
        return lambda module, inputs, result: times[name].update(wait(result) - begins[name])

    if enable_fp16:
        model.half()
    for name in times:
        layer = model.get_submodule(name)
        handles += [layer.register_forward_pre_hook(start_timer(name)), layer.register_forward_hook(stop_timer(name))]
    try:
        with torch.no_grad():
            for index, batch in enumerate(data_loader):
                if index >= n_samples:
                    break
                x = batch if collect_fn is None else collect_fn(batch)
                model(x.half() if enable_fp16 else x)
    finally:
        for handle in handles:
            handle.remove()
    return times
