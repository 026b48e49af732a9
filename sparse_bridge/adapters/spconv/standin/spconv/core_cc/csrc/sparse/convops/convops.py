"""The tuner of implicit GEMMs."""

from sparse_bridge.adapters.spconv.upstream.missing import tuner_class

ConvTunerSimple = tuner_class(__name__, "ConvTunerSimple")
