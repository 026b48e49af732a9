"""The few array primitives that numpy and torch spell differently, so that voxelizing is one code.

On the CPU numpy's are several times faster than torch's on one thread, as in a data loader.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class NumpyOps:
    """Primitives on numpy arrays that share the memory of CPU tensors."""

    @staticmethod
    def array(tensor: torch.Tensor) -> Any:
        return tensor.detach().numpy()

    @staticmethod
    def tensor(array: Any) -> torch.Tensor:
        return torch.from_numpy(array)

    @staticmethod
    def columns(points: Any, count: int) -> Any:
        """A contiguous copy [count, n] of the first columns of `points` [n, F]."""
        return np.array(points[:, :count].T, order="C", copy=True)

    @staticmethod
    def floor_(array: Any) -> None:
        np.floor(array, out=array)

    @staticmethod
    def integers(array: Any, wide: bool) -> Any:
        return array.astype(np.int64 if wide else np.int32)

    @staticmethod
    def numbers(values: list[float], like: Any) -> Any:
        return np.asarray(values, dtype=like.dtype)

    @staticmethod
    def arange(count: int, like: Any) -> Any:
        return np.arange(count, dtype=np.int64)

    @staticmethod
    def filled(count: int, value: int, like: Any) -> Any:
        return np.full(count, value, dtype=np.int64)

    @staticmethod
    def fill_where_(array: Any, mask: Any, value: int) -> None:
        np.putmask(array, mask, value)

    @staticmethod
    def flat_nonzero(mask: Any) -> Any:
        return np.flatnonzero(mask)

    @staticmethod
    def take(array: Any, index: Any) -> Any:
        return array.take(index, axis=0)

    @staticmethod
    def repeat(counts: Any, total: int) -> Any:
        """0 counts[0] times, 1 counts[1] times, ...: int64 [total]."""
        return np.repeat(np.arange(counts.shape[0], dtype=np.int64), counts)

    @staticmethod
    def sort(keys: Any, bound: int) -> tuple[Any, Any]:
        """Stable: (sorted keys, their indices) of `keys` [n] in 0 .. bound."""
        bits = keys.shape[0].bit_length()
        if bits + bound.bit_length() > 63:
            order = np.argsort(keys, kind="stable")
            return keys[order], order
        # The index in the low bits makes keys distinct, so that the fastest sort is a stable one.
        packed = keys.astype(np.int64)
        packed <<= bits
        packed |= np.arange(keys.shape[0])
        packed.sort()
        return packed >> bits, packed & ((1 << bits) - 1)

    @staticmethod
    def put_rows_(target: Any, index: Any, rows: Any) -> None:
        """target[index] = rows, as float32, for contiguous `target` [S, F]; F >= 1."""
        record = f"V{target.shape[1] * target.itemsize}"
        source = np.ascontiguousarray(rows, dtype=target.dtype)
        # Whole rows as single items: half the time of a two-dimensional assignment and less.
        target.view(record)[:, 0][index] = source.view(record)[:, 0]


class TorchOps:
    """The same primitives on torch tensors of any device; results do not depend on threads."""

    @staticmethod
    def array(tensor: torch.Tensor) -> Any:
        return tensor.detach()

    @staticmethod
    def tensor(array: Any) -> torch.Tensor:
        return array

    @staticmethod
    def columns(points: Any, count: int) -> Any:
        return points[:, :count].t().clone(memory_format=torch.contiguous_format)

    @staticmethod
    def floor_(array: Any) -> None:
        array.floor_()

    @staticmethod
    def integers(array: Any, wide: bool) -> Any:
        return array.to(torch.int64 if wide else torch.int32)

    @staticmethod
    def numbers(values: list[float], like: Any) -> Any:
        return like.new_tensor(values)

    @staticmethod
    def arange(count: int, like: Any) -> Any:
        return torch.arange(count, device=like.device)

    @staticmethod
    def filled(count: int, value: int, like: Any) -> Any:
        return torch.full((count,), value, dtype=torch.int64, device=like.device)

    @staticmethod
    def fill_where_(array: Any, mask: Any, value: int) -> None:
        array.masked_fill_(mask, value)

    @staticmethod
    def flat_nonzero(mask: Any) -> Any:
        return mask.nonzero().squeeze(1)

    @staticmethod
    def take(array: Any, index: Any) -> Any:
        return array.index_select(0, index)

    @staticmethod
    def repeat(counts: Any, total: int) -> Any:
        return torch.repeat_interleave(counts.long(), output_size=total)

    @staticmethod
    def sort(keys: Any, bound: int) -> tuple[Any, Any]:
        return torch.sort(keys, stable=True)

    @staticmethod
    def put_rows_(target: Any, index: Any, rows: Any) -> None:
        target.index_copy_(0, index, rows.to(target.dtype))


def ops_for(device: torch.device) -> type[NumpyOps] | type[TorchOps]:
    return NumpyOps if device.type == "cpu" else TorchOps
