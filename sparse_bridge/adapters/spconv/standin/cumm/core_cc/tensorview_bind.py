"""Where pickles of the original look for the enums of cumm."""

import enum

from sparse_bridge.adapters.spconv.upstream.tensorview import activation_of

# Defined here by name, so pickles written here load with the original, and the other way round.
Activation = activation_of(__name__)


class _Enum(enum.IntEnum):
    __str__ = enum.Enum.__str__


class ConvOpType(_Enum):
    Forward = 0
    BackwardInput = 1
    BackwardWeight = 2


class ConvMode(_Enum):
    Convolution = 0
    CrossCorrelation = 1


class ConvIterAlgo(_Enum):
    Analytic = 0
    Optimized = 1


class ConvLayoutType(_Enum):
    ChannelFirst = 0
    ChannelLast = 1
    SpatialFirst = 2


class ShuffleStrideType(_Enum):
    NoShuffle = 0
    ShuffleAC = 1
    ShuffleAB = 2
