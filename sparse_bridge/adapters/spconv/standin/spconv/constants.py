"""Switches that projects read or assign.

Those with an effect are looked up where they matter (`adapters/spconv/rules/switches.py`). The
table of all of them is in docs/spconv.md.
"""

import enum
import os
from pathlib import Path

from sparse_bridge.errors import ContractError, UnsupportedError

PACKAGE_NAME = "spconv"
PACKAGE_ROOT = Path(__file__).parent.resolve()
EDITABLE_INSTALLED = False
DISABLE_JIT = os.getenv("SPCONV_DISABLE_JIT", "0") == "1"
NDIM_DONT_CARE = 3
ALL_WEIGHT_IS_KRSC = True
FILTER_HWIO = False
if os.getenv("SPCONV_FILTER_HWIO") is not None:
    raise UnsupportedError("SPCONV_FILTER_HWIO is deprecated; use SPCONV_SAVED_WEIGHT_LAYOUT to load old weights.")

SAVED_WEIGHT_LAYOUT = os.getenv("SPCONV_SAVED_WEIGHT_LAYOUT", "")
if SAVED_WEIGHT_LAYOUT not in ("", "KRSC", "RSKC", "RSCK"):
    raise ContractError(f"SPCONV_SAVED_WEIGHT_LAYOUT is {SAVED_WEIGHT_LAYOUT!r}; expected KRSC, RSKC or RSCK.")

BOOST_ROOT = os.getenv("BOOST_ROOT")
SPCONV_DEBUG_SAVE_PATH = os.getenv("SPCONV_DEBUG_SAVE_PATH", "")
SPCONV_BWD_SPLITK = [int(part) for part in os.getenv("SPCONV_BWD_SPLITK", "1,2,4,8,16,32,64").split(",")]
SPCONV_DO_SORT = os.getenv("SPCONV_DO_SORT", "1") == "1"
SPCONV_FX_TRACE_MODE = os.getenv("SPCONV_FX_TRACE_MODE", "0") == "1"
SPCONV_CPP_INDICE_PAIRS_IGEMM = os.getenv("SPCONV_CPP_INDICE_PAIRS_IGEMM", "0") == "1"
SPCONV_INT8_DEBUG = os.getenv("SPCONV_INT8_DEBUG", "0") == "1"
SPCONV_DEBUG_NVRTC_KERNELS = False
SPCONV_DEBUG_CPP_ONLY = False
SPCONV_DEBUG_WEIGHT = False
SPCONV_CPP_INDICE_PAIRS = True
# Upstream reads no variable for this one; projects may rather set one than edit their code.
SPCONV_USE_DIRECT_TABLE = os.getenv("SPCONV_USE_DIRECT_TABLE", "1") == "1"
SPCONV_CPP_GEMM = True
SPCONV_DIRECT_TABLE_HASH_SIZE_SCALE = 1.1
SPCONV_ALLOW_TF32 = False


class NVRTCMode(enum.Enum):
    Disabled = 0
    Direct = 1
    DynamicParallism = 2
    KernelAndCPU = 3
    ConstantMemory = 4
    Static = 5


SPCONV_NVRTC_MODE = NVRTCMode.ConstantMemory


class AllocKeys:
    """Names of the scratch buffers of spconv's allocator."""

    PairBwd = "PairBwd"
    IndiceNumPerLoc = "IndiceNumPerLoc"
    PairMask = "PairMask"
    MaskArgSort = "MaskArgSort"
    OutIndices = "OutIndices"
    PairFwd = "PairFwd"
    PairMaskBwd = "PairMaskBwd"
    MaskArgSortBwd = "MaskArgSortBwd"
    MaskOutputFwd = "MaskOutputFwd"
    OutFeatures = "OutFeatures"
    Features = "Features"
    Filters = "Filters"
    OutBp = "OutBp"
    DIn = "DIn"
    DFilters = "DFilters"
    InpBuffer = "InpBuffer"
    OutBuffer = "OutBuffer"
    IndicePairsUniq = "IndicePairsUniq"
    IndicePairsUniqBackup = "IndicePairsUniqBackup"
    HashKOrKV = "HashKOrKV"
    HashV = "HashV"
    ThrustTemp = "ThrustTemp"
    TightUniqueCount = "TightUniqueCount"
