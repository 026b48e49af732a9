"""spconv's `HashTable` on torch tensors: sorted keys in index of a hash table, on every device.

Deterministic: entries keep the order in which their keys first came, and where one call repeats a
key, its first value counts.
"""

from __future__ import annotations

import torch

from ....core.arguments import expect_tensors
from ....errors import ContractError, DataTypeError, DeviceError, OverflowLimitError, ShapeError, UnsupportedError


class HashArgumentError(DataTypeError, AttributeError):
    """`device` is no torch.device; an AttributeError upstream."""


class HashDataTypeError(DataTypeError, KeyError, RuntimeError):
    """A dtype that the table does not take; a KeyError upstream, a RuntimeError in a call."""

    # KeyError shows the repr of its message.
    __str__ = Exception.__str__


class HashRowCountError(ShapeError, RuntimeError):
    """Keys and values differ in length, or are not one-dimensional."""


class HashCapacityError(OverflowLimitError, RuntimeError):
    """More keys than a fixed-size table holds; nothing was inserted."""


_KEY_DTYPES = (torch.int32, torch.int64)
_VALUE_DTYPES = (torch.int32, torch.int64, torch.float32, torch.float64)


class HashTable:
    """A map from integer keys to numbers.

    Args:
        device: where keys and values live.
        key_dtype: torch.int32 or torch.int64; every key value is allowed.
        value_dtype: torch.int32, int64, float32 or float64.
        max_size: how many keys fit; required on a GPU, ignored on the CPU, where the table grows.

    Raises:
        HashDataTypeError: for other dtypes (a KeyError).
        ContractError: on a GPU without max_size (an AssertionError).
    """

    def __init__(
        self, device: torch.device, key_dtype: torch.dtype, value_dtype: torch.dtype, max_size: int = -1
    ) -> None:
        if not isinstance(device, torch.device):
            raise HashArgumentError(f"device is {device!r}; pass a torch.device")
        if key_dtype not in _KEY_DTYPES:
            raise HashDataTypeError(f"keys cannot be {key_dtype}; use one of {_KEY_DTYPES}")
        if value_dtype not in _VALUE_DTYPES:
            raise HashDataTypeError(f"values cannot be {value_dtype}; use one of {_VALUE_DTYPES}")
        self.is_cpu = device.type == "cpu"
        self.key_dtype, self.value_dtype = key_dtype, value_dtype
        self.key_itemsize, self.value_itemsize = key_dtype.itemsize, value_dtype.itemsize
        if not self.is_cpu and max_size <= 0:
            raise ContractError("you must provide max_size for a table on a GPU, usually twice the number of keys")
        self._capacity = None if self.is_cpu else int(max_size)
        # Entries in the order of their first insertion; `_sorted[i]` is the key of `_entry[i]`.
        self._keys = torch.empty(0, dtype=key_dtype, device=device)
        self._values = torch.empty(0, dtype=value_dtype, device=device)
        self._sorted = self._keys
        self._entry = torch.empty(0, dtype=torch.int64, device=device)

    def __len__(self) -> int:
        return self._keys.shape[0]

    def insert(self, keys: torch.Tensor, values: torch.Tensor | None = None) -> None:
        """Add keys [n] with values [n] (0 without); keys that are present keep their value.

        Raises HashCapacityError, and inserts nothing, where the table is too small for the keys.
        """
        self._check(keys, self.key_dtype, "keys")
        if values is not None:
            self._check_values(keys, values)
        ordered, order = torch.sort(keys.detach(), stable=True)
        first = torch.ones_like(ordered, dtype=torch.bool)
        first[1:] = ordered[1:] != ordered[:-1]
        _, absent = self._find(ordered)
        # Back to input order, so that entries are in the order of their first occurrence.
        rows = torch.sort(order[first & absent]).values
        size = len(self) + rows.shape[0]
        if self._capacity is not None and size > self._capacity:
            raise HashCapacityError(
                f"{rows.shape[0]} new keys do not fit beside the {len(self)} present ones in a "
                f"table of max_size={self._capacity}; create it larger"
            )
        added = self._values.new_zeros(rows.shape[0])
        if values is not None:
            added = values.detach().index_select(0, rows)
        all_keys = torch.cat((self._keys, keys.detach().index_select(0, rows)))
        added = torch.cat((self._values, added))
        sorted_keys, entry = torch.sort(all_keys)
        # All or nothing: memory may run out on the way.
        self._keys, self._values, self._sorted, self._entry = all_keys, added, sorted_keys, entry

    def query(self, keys: torch.Tensor, values: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(values [n], is_empty bool [n]) of keys [n]; is_empty is True where a key is absent.

        `values` is an optional buffer [n] for the result. The value of an absent key is 0.
        """
        self._check(keys, self.key_dtype, "keys")
        if values is None:
            values = torch.empty(keys.shape, dtype=self.value_dtype, device=self._keys.device)
        else:
            self._check_values(keys, values)
        entry, absent = self._find(keys.detach())
        with torch.no_grad():
            if len(self):
                values.copy_(self._values.index_select(0, entry).masked_fill_(absent, 0))
            else:
                values.zero_()
        return values, absent

    def insert_exist_keys(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Overwrite the values of the keys [n] that are present; uint8 [n], 1 = key is absent."""
        self._check(keys, self.key_dtype, "keys")
        self._check_values(keys, values)
        entry, absent = self._find(keys.detach())
        rows = absent.logical_not().nonzero().squeeze(1)
        # Stable, so that the first of equal keys comes first.
        target, order = torch.sort(entry.index_select(0, rows), stable=True)
        first = torch.ones_like(target, dtype=torch.bool)
        first[1:] = target[1:] != target[:-1]
        chosen = rows.index_select(0, order[first])
        self._values[target[first]] = values.detach().index_select(0, chosen)
        return absent.to(torch.uint8)

    def assign_arange_(self) -> torch.Tensor:
        """Number the entries 0 .. n-1 in table order; returns n as an int64 tensor [1]."""
        if self.value_dtype.is_floating_point:
            raise UnsupportedError(f"assign_arange_ numbers entries and needs integer values, not {self.value_dtype}")
        self._values = torch.arange(len(self), device=self._keys.device).to(self.value_dtype)
        return self._count()

    def items(self, max_size: int = -1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(keys, values, count): copies of the entries in table order; count is int64 [1].

        The arrays have `max_size` slots if given, else the table's capacity on a GPU and exactly
        `count` on the CPU; slots after `count` are 0. Raises HashCapacityError if `max_size` is
        smaller than `count`.
        """
        length = max_size if max_size > 0 else (self._capacity or len(self))
        if length < len(self):
            raise HashCapacityError(f"max_size={length} is too small for {len(self)} entries")
        keys, values = self._keys.new_zeros(length), self._values.new_zeros(length)
        keys[: len(self)], values[: len(self)] = self._keys, self._values
        return keys, values, self._count()

    def _count(self) -> torch.Tensor:
        return torch.tensor([len(self)], device=self._keys.device)

    def _find(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(entry of each key, whether it is absent); the entry of an absent key is arbitrary."""
        if not len(self):
            return torch.zeros_like(keys, dtype=torch.int64), torch.ones_like(keys, dtype=torch.bool)
        index = torch.searchsorted(self._sorted, keys.contiguous()).clamp_(max=len(self) - 1)
        absent = self._sorted.index_select(0, index) != keys
        return self._entry.index_select(0, index), absent

    def _check(self, tensor: torch.Tensor, dtype: torch.dtype, argument: str) -> None:
        expect_tensors("HashTable", **{argument: tensor})
        if tensor.dtype != dtype:
            raise HashDataTypeError(f"{argument} are {tensor.dtype}; this table takes {dtype}")
        if tensor.ndim != 1:
            raise HashRowCountError(f"{argument} have shape {list(tensor.shape)}; expected [n]")
        if tensor.device != self._keys.device:
            raise DeviceError(f"{argument} are on {tensor.device}, the table is on {self._keys.device}")

    def _check_values(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._check(values, self.value_dtype, "values")
        if values.shape != keys.shape:
            raise HashRowCountError(f"got {values.shape[0]} values for {keys.shape[0]} keys; they must pair up")
