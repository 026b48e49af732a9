"""Products, and the names of spconv's tuners: sparse_bridge chooses tiles by itself."""

from spconv.core_cc.csrc.sparse.convops import convops, gemmops, spops

from sparse_bridge.adapters.spconv.upstream.allocator import ExternalSpconvMatmul as ExternalSpconvMatmul
from sparse_bridge.adapters.spconv.upstream.missing import missing_class

__all__ = ["ConvTuneResult", "ExternalSpconvMatmul", "GemmTuneResult", "convops", "gemmops", "spops"]

ConvTuneResult = missing_class(__name__, "ConvTuneResult")
GemmTuneResult = missing_class(__name__, "GemmTuneResult")
