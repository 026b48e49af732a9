"""Facts about a build of cumm; here there is none."""

from pathlib import Path

PACKAGE_NAME = "cumm"
PACKAGE_ROOT = Path(__file__).parent.resolve()
CUMM_CPU_ONLY_BUILD = False
CUMM_CUDA_VERSION = None
CUMM_DISABLE_JIT = True
CUMM_MAXIMUM_NVRTC_CONV_NDIM = 3
