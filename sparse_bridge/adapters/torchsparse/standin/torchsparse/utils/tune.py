"""Tuning of the original's own kernels, which are not used here."""

from sparse_bridge.log import once

__all__ = ["tune"]


def tune(model, data_loader, *args, **kwargs):
    """Accepts what the original takes and leaves the model as it is: kernels here choose
    themselves."""
    once(
        ("torchsparse-tune",),
        "torchsparse.tune was called; sparse_bridge has nothing to tune by it, the model is "
        "unchanged.",
    )
