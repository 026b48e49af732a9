"""Facts about torch."""

import torch

# Where torch's version string goes on behind its numbers, -1 for nowhere.
remove_plus = torch.__version__.find("+")
remove_dotdev = torch.__version__.find(".dev")
PYTORCH_VERSION = [int(part) for part in torch.__version__.split("+")[0].split("a")[0].split(".dev")[0].split(".")[:3]]
TORCH_HAS_AMP = True


def is_amp_enabled():
    return torch.is_autocast_enabled()
