"""Kinds of kernels by name."""

import enum

from cumm.core_cc.tensorview_bind import ShuffleStrideType as ShuffleStrideType


class GemmAlgo(enum.Enum):
    Simt = "Simt"
    SimtDP4A = "SimtDP4A"
    SimtDP2A = "SimtDP2A"
    Volta = "Volta"
    Turing = "Turing"
    Ampere = "Ampere"
