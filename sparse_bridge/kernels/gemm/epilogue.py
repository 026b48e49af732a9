"""What follows the sums of a product, in its kernel. In torch: `core/conv/epilogue.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from ..tiles import activation_numbers, epilogue_bits

# On the left of what they are combined with, since in the interpreter that is a plain number.
BIAS = tl.constexpr(epilogue_bits.BIAS)
NORM = tl.constexpr(epilogue_bits.NORM)
AFFINE = tl.constexpr(epilogue_bits.AFFINE)
RESIDUAL = tl.constexpr(epilogue_bits.RESIDUAL)
RELU = tl.constexpr(activation_numbers.RELU)
LEAKY_RELU = tl.constexpr(activation_numbers.LEAKY_RELU)


@triton.jit
def _rounded(value, DTYPE: tl.constexpr):
    """fp32 values as a result of `DTYPE` holds them."""
    return value.to(DTYPE).to(tl.float32)


@triton.jit
def _normed(value, mean_ptr, var_ptr, gain_ptr, beta_ptr, eps, channel, ok, AFFINE: tl.constexpr):
    """A normalisation by fixed statistics, in the operations and the order of torch's own kernel:
    fma(gain * (x - mean), rsqrt(var + eps), beta). channel, ok: of every value."""
    mean = tl.load(mean_ptr + channel, mask=ok, other=0.0).to(tl.float32)
    var = tl.load(var_ptr + channel, mask=ok, other=1.0).to(tl.float32)
    value = value - mean
    scale = tl.rsqrt(var + eps)
    if AFFINE:
        gain = tl.load(gain_ptr + channel, mask=ok, other=0.0).to(tl.float32)
        beta = tl.load(beta_ptr + channel, mask=ok, other=0.0).to(tl.float32)
        scale, beta = tl.broadcast_to(scale, value.shape), tl.broadcast_to(beta, value.shape)
        value = tl.fma(gain * value, scale, beta)
    else:
        value = value * scale
    return value


@triton.jit
def _activated(value, alpha, ACT: tl.constexpr, DTYPE: tl.constexpr):
    """Behind an activation, in fp32. ACT: a number of `tiles/activation_numbers.py`, or 0."""
    if RELU == ACT:
        value = tl.where(value <= 0, 0.0, value)  # a NaN stays
    if LEAKY_RELU == ACT:
        value = _rounded(value, DTYPE)
        value = tl.where(value > 0, value, value * alpha)
    return value


@triton.jit
def _finished(
    acc,
    bias_ptr,
    mean_ptr,
    var_ptr,
    gain_ptr,
    beta_ptr,
    residual_ptr,
    alpha,
    eps,
    channel,
    ok_c,
    at,
    ok,
    EPILOGUE: tl.constexpr,
    ACT: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """What follows the sums, in fp32; rounded to `DTYPE` wherever separate operations would round,
    so that the result has their bits.

    EPILOGUE: bits, see `EpilogueForm`. ACT: see `_activated`.
    channel, ok_c: the channels, of a shape that broadcasts to that of acc. at, ok: places of the
    results, which are those of the residual.
    """
    if BIAS & EPILOGUE:
        acc += tl.load(bias_ptr + channel, mask=ok_c, other=0.0).to(tl.float32)
    elif (NORM | RESIDUAL) & EPILOGUE == NORM | RESIDUAL:
        # Sums are never -0, so this changes nothing. Where accumulators go straight to a rounding
        # and, past a norm, to another layout, ptxas runs all of wgmma in turns (C7514, Triton 3.6
        # and 3.9): a residual U-Net took a sixth longer.
        acc += 0.0
    if NORM & EPILOGUE:
        acc = _normed(
            _rounded(acc, DTYPE), mean_ptr, var_ptr, gain_ptr, beta_ptr, eps, channel, ok_c, (AFFINE & EPILOGUE) != 0
        )
    if RESIDUAL & EPILOGUE:
        acc = _rounded(acc, DTYPE)
        residual = tl.load(residual_ptr + at, mask=ok, other=0.0)
        acc = acc + residual.to(tl.float32)
    return _activated(acc, alpha, ACT, DTYPE)
