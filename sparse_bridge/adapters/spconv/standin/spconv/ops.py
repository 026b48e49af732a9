"""Where spconv 1.x kept `spconv.pytorch.ops`; the same module object."""

import sys

from spconv.pytorch import ops

sys.modules[__name__] = ops
