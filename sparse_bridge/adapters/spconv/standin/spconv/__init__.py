"""spconv, answered by sparse_bridge: the same names and rules on every GPU and the CPU.

Names of spconv 1.x (`spconv.SubMConv3d`, `spconv.modules`, ...) are found here too, those of
`spconv.pytorch`.
"""

import importlib

# A plain number triple: projects parse it as `float(version[2:])` and compare it as a string.
__version__ = "2.3.8"

from spconv import build, constants, core, core_cc, cppconstants, debug_utils, tools, utils

# The module takes the name of the string, which takes it back.
from spconv.__version__ import __version__  # noqa: F811
from spconv.core import AlgoHint, ConvAlgo

SPCONV_VERSION_NUMBERS = [int(part) for part in __version__.split(".")]

__all__ = [
    "SPCONV_VERSION_NUMBERS",
    "AlgoHint",
    "ConvAlgo",
    "build",
    "constants",
    "core",
    "core_cc",
    "cppconstants",
    "debug_utils",
    "tools",
    "utils",
]

_FIRST_GENERATION = frozenset(
    [
        "AddTable",
        "ConcatTable",
        "Identity",
        "JoinTable",
        "RemoveGrid",
        "SparseConv2d",
        "SparseConv3d",
        "SparseConv4d",
        "SparseConvTensor",
        "SparseConvTranspose2d",
        "SparseConvTranspose3d",
        "SparseInverseConv2d",
        "SparseInverseConv3d",
        "SparseInverseConv4d",
        "SparseMaxPool2d",
        "SparseMaxPool3d",
        "SparseModule",
        "SparseSequential",
        "SubMConv2d",
        "SubMConv3d",
        "SubMConv4d",
        "ToDense",
        "conv",
        "functional",
        "identity",
        "modules",
        "ops",
        "pool",
        "scatter_nd",
        "tables",
    ]
)


def __getattr__(name):
    if name in _FIRST_GENERATION:
        home = "spconv.pytorch.core" if name == "scatter_nd" else "spconv.pytorch"
        return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'spconv' has no attribute {name!r}")
