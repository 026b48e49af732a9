"""Blocks of residual networks."""

from MinkowskiEngine.modules import resnet_block, senet_block

__all__ = ["resnet_block", "senet_block"]
