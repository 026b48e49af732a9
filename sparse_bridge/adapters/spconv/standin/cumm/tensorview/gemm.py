"""`cumm.tensorview.gemm`: enums and descriptions of kernels."""

from cumm.core_cc.tensorview_bind import Activation as Activation
from cumm.core_cc.tensorview_bind import ConvIterAlgo as ConvIterAlgo
from cumm.core_cc.tensorview_bind import ConvLayoutType as ConvLayoutType
from cumm.core_cc.tensorview_bind import ConvMode as ConvMode
from cumm.core_cc.tensorview_bind import ConvOpType as ConvOpType
from cumm.core_cc.tensorview_bind import ShuffleStrideType as ShuffleStrideType

from sparse_bridge.adapters.spconv.upstream.missing import missing_class

ConvAlgoDesp, ConvParams, GemmAlgoDesp, GemmParams, NVRTCParams = (
    missing_class(__name__, name)
    for name in ("ConvAlgoDesp", "ConvParams", "GemmAlgoDesp", "GemmParams", "NVRTCParams")
)
run_nvrtc_conv_kernel, run_nvrtc_gemm_kernel = (
    missing_class(__name__, name) for name in ("run_nvrtc_conv_kernel", "run_nvrtc_gemm_kernel")
)
