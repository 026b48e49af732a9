"""Where spconv 1.x kept `spconv.pytorch.conv`; the same module object."""

import sys

from spconv.pytorch import conv

sys.modules[__name__] = conv
