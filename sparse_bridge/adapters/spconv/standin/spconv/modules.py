"""Where spconv 1.x kept `spconv.pytorch.modules`; the same module object."""

import sys

from spconv.pytorch import modules

sys.modules[__name__] = modules
