"""Where spconv 1.x kept `spconv.pytorch.pool`; the same module object."""

import sys

from spconv.pytorch import pool

sys.modules[__name__] = pool
