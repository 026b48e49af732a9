"""Where layers run by default: device and dataflow, for `status()`."""

from __future__ import annotations

from .. import native, settings


def mistrusted() -> tuple[str, ...]:
    """What GPUs of this process compute without kernels, because the self-check failed; and why
    their calls go without the compiled helper, where they do."""
    import torch

    from ..core.device import device_support

    why = native.reason() if torch.cuda.is_initialized() else None
    return (*device_support.notes(), *([] if why is None else [f"no helper in C: {why}"]))


def of_layers() -> tuple[str, str]:
    """Default dataflow and device, without waking a GPU that the process has not used yet.

    Waking it would forbid forking worker processes afterwards.
    """
    import torch

    forced = settings.get().dataflow
    if not torch.cuda.is_available():
        return ("per_offset" if forced == "auto" else forced), "cpu"
    if not torch.cuda.is_initialized():
        return forced, "cuda (not used yet)"
    from ..core.device.device_support import kernel_target

    device = torch.device("cuda", torch.cuda.current_device())
    if forced == "auto":
        forced = "per_offset" if kernel_target(device) is None else "auto"
    return forced, f"{device} {torch.cuda.get_device_name(device)}"
