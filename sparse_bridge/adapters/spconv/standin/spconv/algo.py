"""spconv's run-time tuners; sparse_bridge chooses tiles by itself."""

from sparse_bridge.errors import UnsupportedError


class _Tuner:
    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedError(
            f"spconv.algo.{self._name}.{name} tunes spconv's own kernels, which are not used here."
        )


GEMM, CONV, GEMM_CPP, CONV_CPP = (_Tuner(name) for name in ("GEMM", "CONV", "GEMM_CPP", "CONV_CPP"))
