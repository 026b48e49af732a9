"""Nothing is compiled ahead of time."""

from spconv.constants import DISABLE_JIT as DISABLE_JIT
from spconv.constants import PACKAGE_NAME as PACKAGE_NAME
from spconv.constants import PACKAGE_ROOT as PACKAGE_ROOT
from spconv.constants import SPCONV_INT8_DEBUG as SPCONV_INT8_DEBUG
