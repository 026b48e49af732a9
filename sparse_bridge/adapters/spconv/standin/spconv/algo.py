"""spconv's run-time tuners; sparse_bridge chooses tiles by itself. Every use raises."""

from spconv.core_cc import MissingExtensionError


class _Tuner:
    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        raise MissingExtensionError.of(f"spconv.algo.{self._name}", name)


GEMM, CONV, GEMM_CPP, CONV_CPP = (_Tuner(name) for name in ("GEMM", "CONV", "GEMM_CPP", "CONV_CPP"))


def __getattr__(name):
    raise MissingExtensionError.of(__name__, name)
