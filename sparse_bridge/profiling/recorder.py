"""`ModelProfile`, what `sparse_bridge.profile` returns."""

from ..tools.profiling.recorder import ModelProfile

__all__ = ["ModelProfile"]
