"""A small arithmetic coder with the interface of `torchac`, in Python integers (Witten, Neal and
Cleary, 1987: 32-bit bounds, bits that are not settled yet are counted)."""

from __future__ import annotations

import bisect
import itertools

import torch

_BITS, _TOTAL = 32, 1 << 16
_TOP = 1 << _BITS
_HALF, _QUARTER = _TOP // 2, _TOP // 4


def _rows(cdf: torch.Tensor) -> list[list[int]]:
    """Cumulative counts; int16 holds unsigned values, of which the last is the total."""
    rows = (cdf.int() & 0xFFFF).tolist()
    for row in rows:
        row[-1] = _TOTAL
        assert all(a < b for a, b in itertools.pairwise(row)), "not ascending"
    return rows


def encode_int16_normalized_cdf(cdf: torch.Tensor, symbols: torch.Tensor) -> bytes:
    low, high, waiting, bits = 0, _TOP - 1, 0, []

    def write(bit):
        nonlocal waiting
        bits.extend([bit] + [1 - bit] * waiting)
        waiting = 0

    assert cdf.dtype == symbols.dtype == torch.int16 and not cdf.is_cuda and not symbols.is_cuda
    for row, symbol in zip(_rows(cdf), symbols.tolist(), strict=True):
        span = high - low + 1
        low, high = low + span * row[symbol] // _TOTAL, low + span * row[symbol + 1] // _TOTAL - 1
        while True:
            if high < _HALF or low >= _HALF:
                write(int(low >= _HALF))
            elif low >= _QUARTER and high < 3 * _QUARTER:
                waiting += 1
                low, high = low - _QUARTER, high - _QUARTER
            else:
                break
            low, high = low % _HALF * 2, high % _HALF * 2 + 1
    waiting += 1
    write(int(low >= _QUARTER))
    bits += [0] * (-len(bits) % 8)
    return bytes(int("".join(map(str, bits[at : at + 8])), 2) for at in range(0, len(bits), 8))


def decode_int16_normalized_cdf(cdf: torch.Tensor, data: bytes) -> torch.Tensor:
    stream = iter("".join(f"{byte:08b}" for byte in data) + "0" * 4 * _BITS)
    low, high, value = 0, _TOP - 1, 0
    for _ in range(_BITS):
        value = 2 * value + int(next(stream))
    found = []
    for row in _rows(cdf):
        span = high - low + 1
        symbol = bisect.bisect_right(row, ((value - low + 1) * _TOTAL - 1) // span) - 1
        found.append(symbol)
        low, high = low + span * row[symbol] // _TOTAL, low + span * row[symbol + 1] // _TOTAL - 1
        while high < _HALF or low >= _HALF or (low >= _QUARTER and high < 3 * _QUARTER):
            if not (high < _HALF or low >= _HALF):
                low, high, value = low - _QUARTER, high - _QUARTER, value - _QUARTER
            low, high = low % _HALF * 2, high % _HALF * 2 + 1
            value = value % _HALF * 2 + int(next(stream, "0"))
    return torch.tensor(found, dtype=torch.int16)
