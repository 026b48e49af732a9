"""Integer helpers."""

from cumm.gemm.codeops import align_up as align_up
from cumm.gemm.codeops import div_up as div_up
