"""Names of FlexGEMM's convolution kernels. Calling one raises UnsupportedError: what they take are
internals of its dataflows; `flex_gemm.ops.spconv` is served."""

from sparse_bridge.adapters.flex_gemm.upstream.extension import refused

from . import config

_KINDS = ("sparse_submanifold_conv", "sparse_conv")
_FORMS = ("implicit_gemm", "implicit_gemm_splitk", "masked_implicit_gemm", "masked_implicit_gemm_splitk")
_NAMES = [f"{layer}_{way}_{form}" for layer in _KINDS for way in ("fwd", "bwd") for form in _FORMS]
globals().update({name: refused(name) for name in _NAMES})

__all__ = ["config", *_NAMES]
