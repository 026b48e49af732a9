"""Facts about torch."""

import torch

PYTORCH_VERSION = [
    int(part)
    for part in torch.__version__.split("+")[0].split("a")[0].split(".dev")[0].split(".")[:3]
]
TORCH_HAS_AMP = True


def is_amp_enabled():
    return torch.is_autocast_enabled()
