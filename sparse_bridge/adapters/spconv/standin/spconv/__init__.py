"""spconv, answered by sparse_bridge: the same names and rules, one engine for every GPU and the CPU."""

# A plain number triple: projects parse it as `float(version[2:])` and compare it as a string.
__version__ = "2.3.8"

SPCONV_VERSION_NUMBERS = [int(part) for part in __version__.split(".")]

from . import build, constants, core, core_cc, cppconstants, debug_utils, tools, utils  # noqa: E402, F401
from .core import AlgoHint, ConvAlgo  # noqa: E402, F401
