"""Mode setters. As in the original they are remembered and change no result."""

from enum import Enum

from sparse_bridge.errors import ContractError
from sparse_bridge.log import once

__all__ = [
    "ConvMode",
    "get_conv_mode",
    "get_downsample_mode",
    "get_kmap_mode",
    "set_conv_mode",
    "set_downsample_mode",
    "set_kmap_mode",
]


class ConvMode(Enum):
    """How the original sorts its rows."""

    mode0 = 0
    mode1 = 1
    mode2 = 2


_conv_mode = ConvMode.mode0
_kmap_mode = "hashmap_on_the_fly"
_downsample_mode = "spconv"


def _say_that_nothing_changes(field):
    once(
        ("torchsparse-setter", field),
        f"torchsparse's set_{field} changes no layer, there or here: set the field {field} of a conv config.",
    )


def get_conv_mode():
    """The last value set."""
    return _conv_mode


def set_conv_mode(conv_mode):
    """0, 1, 2 or a ConvMode."""
    global _conv_mode
    if isinstance(conv_mode, int) and not isinstance(conv_mode, bool) and 0 <= conv_mode <= 2:
        conv_mode = ConvMode(conv_mode)
    if not isinstance(conv_mode, ConvMode):
        raise ContractError(f"conv mode is {conv_mode!r}; expected 0, 1, 2 or a ConvMode.")
    _conv_mode = conv_mode


def get_kmap_mode():
    """The last value set."""
    return _kmap_mode


def set_kmap_mode(kmap_mode):
    """Remembered only; the config's field `kmap_mode` is what counts."""
    global _kmap_mode
    if kmap_mode not in ("hashmap", "hashmap_on_the_fly"):
        raise ContractError(f"kmap mode is {kmap_mode!r}; expected 'hashmap' or 'hashmap_on_the_fly'.")
    _kmap_mode = kmap_mode
    _say_that_nothing_changes("kmap_mode")


def get_downsample_mode():
    """The last value set."""
    return _downsample_mode


def set_downsample_mode(downsample_mode):
    """Remembered only; the config's field `downsample_mode` is what counts."""
    global _downsample_mode
    if downsample_mode not in ("spconv", "minkowski"):
        raise ContractError(f"downsample mode is {downsample_mode!r}; expected 'spconv' or 'minkowski'.")
    _downsample_mode = downsample_mode
    _say_that_nothing_changes("downsample_mode")
