"""Where pickles of the original look for the activation enum."""

from sparse_bridge.adapters.spconv.tensorview import Activation

Activation.__module__ = (
    __name__  # pickles written here load with the original, and the other way round
)
