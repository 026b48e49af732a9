"""Layouts and kinds of convolutions."""

import enum
from typing import NamedTuple

from cumm.core_cc.tensorview_bind import ConvIterAlgo as ConvIterAlgo
from cumm.core_cc.tensorview_bind import ConvLayoutType as ConvLayoutType


class ConvOpType(enum.Enum):
    kForward = 0
    kBackwardInput = 1
    kBackwardWeight = 2


class ConvMode(enum.Enum):
    kConvolution = 0
    kCrossCorrelation = 1


class ConvLayout(NamedTuple):
    layout_type: ConvLayoutType
    interleave: int = 1


NHWC = KRSC = ConvLayout(ConvLayoutType.ChannelLast)
NCHW = ConvLayout(ConvLayoutType.ChannelFirst)
RSKC = ConvLayout(ConvLayoutType.SpatialFirst)
