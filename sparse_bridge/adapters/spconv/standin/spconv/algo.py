"""spconv's run-time tuners; sparse_bridge chooses tiles by itself.

The tuner objects can be imported and handed to `ConvGemmOps`; asking them to tune raises.
"""

from spconv.core_cc.csrc.sparse.convops.convops import ConvTunerSimple
from spconv.core_cc.csrc.sparse.convops.gemmops import GemmTunerSimple

from sparse_bridge.adapters.spconv.upstream.missing import MissingExtensionError, tuner_class

SimpleGemm = tuner_class(__name__, "SimpleGemm")
SimpleConv = tuner_class(__name__, "SimpleConv")
GEMM, CONV = SimpleGemm(), SimpleConv()
GEMM_CPP, CONV_CPP = GemmTunerSimple(), ConvTunerSimple()


def __getattr__(name):
    raise MissingExtensionError.of(__name__, name)
