"""Where spconv 1.x kept `spconv.pytorch.functional`; the same module object."""

import sys

from spconv.pytorch import functional

sys.modules[__name__] = functional
