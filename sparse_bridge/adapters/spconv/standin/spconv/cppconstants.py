"""Facts about a compiled build; here there is none, and every GPU that Triton knows is served."""

from spconv.core_cc.csrc.sparse.all import SpconvOps as SpconvOps
from spconv.core_cc.csrc.utils.boxops import BoxOps as BoxOps
from spconv.core_cc.cumm.common import CompileInfo as CompileInfo

CPU_ONLY_BUILD = False
BUILD_CUMM_VERSION = "0.7.11"
BUILD_PCCM_VERSION = "0.4.16"
HAS_BOOST = True  # the rotated box operations work
COMPILED_CUDA_ARCHS: set = set()
COMPILED_CUDA_GEMM_ARCHS: set = set()
