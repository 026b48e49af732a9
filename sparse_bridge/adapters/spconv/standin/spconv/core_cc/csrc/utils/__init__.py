"""Boxes and point clouds."""

from spconv.core_cc.csrc.utils import boxops, pcc

__all__ = ["boxops", "pcc"]
