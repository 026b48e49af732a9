"""The part of cumm that spconv projects import: `cumm.tensorview`."""

__version__ = "0.7.11"
