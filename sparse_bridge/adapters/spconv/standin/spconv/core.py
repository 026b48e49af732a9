"""Algorithm names. All run on the same engine; a layer only remembers which it was given."""

from enum import Enum

from cumm.conv.bases import NCHW as NCHW
from cumm.conv.bases import NHWC as NHWC
from cumm.conv.bases import ConvIterAlgo as ConvIterAlgo
from cumm.conv.bases import ConvLayout as ConvLayout
from cumm.conv.bases import ConvLayoutType as ConvLayoutType
from cumm.conv.bases import ConvMode as ConvMode
from cumm.conv.bases import ConvOpType as ConvOpType
from cumm.gemm.algospec.core import GemmAlgo as GemmAlgo
from spconv.constants import NDIM_DONT_CARE as NDIM_DONT_CARE
from spconv.constants import SPCONV_INT8_DEBUG as SPCONV_INT8_DEBUG


class ConvAlgo(Enum):
    Native = 0
    MaskImplicitGemm = 1
    MaskSplitImplicitGemm = 2


class AlgoHint(Enum):
    NoHint = 0
    Fowrard = 1
    BackwardInput = 2
    BackwardWeight = 4
