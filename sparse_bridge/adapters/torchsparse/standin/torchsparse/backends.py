"""Switches. `allow_tf32` counts for fp32 convolutions; the others are accepted and change nothing,
but a `hash_rsv_ratio` below 2 is refused by convolutions.

The capability is asked for when something reads it, so that importing does not wake a GPU.
"""

benchmark = False
hash_rsv_ratio = 2


def _capability():
    import torch

    if not torch.cuda.is_available():
        return 0
    major, minor = torch.cuda.get_device_capability()
    return 100 * major + 10 * minor


def init():
    """Back to the defaults of this device."""
    global benchmark, hash_rsv_ratio
    benchmark, hash_rsv_ratio = False, 2
    for name in ("allow_tf32", "allow_fp16", "device_capability"):
        globals().pop(name, None)


def __getattr__(name):
    if name == "device_capability":
        return _capability()
    if name == "allow_tf32":
        return _capability() >= 800
    if name == "allow_fp16":
        return _capability() >= 750
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
