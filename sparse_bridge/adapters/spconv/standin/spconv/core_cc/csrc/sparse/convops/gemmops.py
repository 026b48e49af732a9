"""The tuner of matrix products."""

from sparse_bridge.adapters.spconv.upstream.missing import tuner_class

GemmTunerSimple = tuner_class(__name__, "GemmTunerSimple")
