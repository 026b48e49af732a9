"""Helpers of the convolution."""

from . import collections
from .collections import AttributeDict

__all__ = ["AttributeDict", "collections"]
