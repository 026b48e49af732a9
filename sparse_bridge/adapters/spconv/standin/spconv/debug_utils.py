"""Saving inputs for bug reports is left to the application."""

from spconv.constants import SPCONV_DEBUG_SAVE_PATH as SPCONV_DEBUG_SAVE_PATH

from sparse_bridge.errors import UnsupportedError


def spconv_save_debug_data(data):
    raise UnsupportedError(
        "spconv_save_debug_data writes spconv's internal state, which does not exist here."
    )
