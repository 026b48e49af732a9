"""Saving inputs for bug reports."""

import pickle
import sys

from spconv import constants
from spconv.constants import SPCONV_DEBUG_SAVE_PATH as SPCONV_DEBUG_SAVE_PATH


def spconv_save_debug_data(data):
    """Pickle `data` to the file `constants.SPCONV_DEBUG_SAVE_PATH`, and say so on stdout.

    It raises nothing: programs call it while they handle an error.
    """
    path = constants.SPCONV_DEBUG_SAVE_PATH
    if not path:
        outcome = "nothing was saved; SPCONV_DEBUG_SAVE_PATH may name a file for it"
    else:
        try:
            with open(path, "wb") as file:
                pickle.dump(data, file)
            outcome = f"saved to {path}"
        except Exception as error:
            outcome = f"not saved to {path}: {type(error).__name__}: {error}"
    sys.stdout.write(f"spconv debug data: {outcome}\n")
