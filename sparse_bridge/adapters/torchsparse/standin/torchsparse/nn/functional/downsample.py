"""Output sites, at their path up to 2.0."""

from torchsparse.nn.functional.conv.kmap.downsample import spdownsample

__all__ = ["spdownsample"]
