"""Algorithm names. All run on the same engine; a layer only remembers which it was given."""

from enum import Enum


class ConvAlgo(Enum):
    Native = 0
    MaskImplicitGemm = 1
    MaskSplitImplicitGemm = 2


class AlgoHint(Enum):
    NoHint = 0
    Fowrard = 1
    BackwardInput = 2
    BackwardWeight = 4
