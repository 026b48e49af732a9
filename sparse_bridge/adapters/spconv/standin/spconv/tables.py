"""Where spconv 1.x kept `spconv.pytorch.tables`; the same module object."""

import sys

from spconv.pytorch import tables

sys.modules[__name__] = tables
