"""Configuration of convolutions. kmap_mode and downsample_mode count; the rest is accepted."""

from enum import Enum

from sparse_bridge.log import once

from .conv_mode import ConvMode
from .utils.collections import AttributeDict

__all__ = [
    "Dataflow",
    "clear_global_conv_config",
    "get_default_conv_config",
    "get_global_conv_config",
    "keys_check",
    "set_global_conv_config",
]


class Dataflow(Enum):
    """Ways of computing in the original; equal up to rounding, so here they are one."""

    ImplicitGEMM = 0
    GatherScatter = 1
    FetchOnDemand = 2
    CodedCSR = 3


_default = AttributeDict(
    dataflow=Dataflow.ImplicitGEMM,
    ifsort=False,
    kmap_mode="hashmap_on_the_fly",
    downsample_mode="spconv",
    split_mask_num=1,
    split_mask_num_bwd=3,
    epsilon=0.0,
    mm_thresh=0,
    FOD_fusion=True,
)
_global = None


def get_default_conv_config(conv_mode=ConvMode.mode0, training=False):
    """The default configuration: one object for all, so edits reach every layer without its own."""
    if conv_mode in (ConvMode.mode1, ConvMode.mode2):
        _default.ifsort = True
    if conv_mode is ConvMode.mode2:
        _default.split_mask_num = 3
    return _default


def get_global_conv_config():
    """The configuration of layers without their own, or None."""
    return _global


def keys_check(conv_config):
    """Fill missing fields of a configuration in from the default, with a warning; the same
    object."""
    missing = [name for name in _default if name not in conv_config]
    if missing:
        once(
            ("torchsparse-config", *missing),
            f"the global conv config lacks {', '.join(missing)}; defaults are filled in.",
        )
        for name in missing:
            conv_config[name] = _default[name]
    return conv_config


def set_global_conv_config(conv_config):
    """Set it; missing fields are filled in from the default."""
    global _global
    _global = keys_check(conv_config)


def clear_global_conv_config():
    """Back to none."""
    global _global
    _global = None
