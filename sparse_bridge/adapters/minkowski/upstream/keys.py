"""`CoordinateMapKey`: the name of a coordinate map inside its manager."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from ....errors import ContractError, DataTypeError
from .. import profile
from ..errors import KeyStateError
from ..geometry import int_list
from ..grid import Key


class CoordinateMapKey:
    """(tensor stride, string id), compared by value; may be made unset and filled in by a layer.

    CoordinateMapKey(D + 1) is unset; CoordinateMapKey([1, 1, 1], "") is set.
    """

    __slots__ = ("_key", "_size")

    def __init__(self, *args: Any) -> None:
        self._key: Key | None = None
        if len(args) == 1 and isinstance(args[0], int):
            self._size = args[0]
        elif len(args) == 2:
            self._size = len(args[0]) + 1
            self.set_key(*args)
        else:
            raise DataTypeError(
                f"CoordinateMapKey{args}; expected a coordinate size, or a tensor stride and a string id."
            )

    @classmethod
    def of(cls, key: Key) -> CoordinateMapKey:
        map_key = object.__new__(cls)
        map_key._key, map_key._size = key, len(key[0]) + 1
        return map_key

    @property
    def key(self) -> Key:
        """What the registry calls this map. Raises KeyStateError if unset."""
        if self._key is None:
            raise KeyStateError("the coordinate map key is not set.")
        return self._key

    def is_key_set(self) -> bool:
        return self._key is not None

    def get_key(self) -> tuple[list[int], str]:
        """(tensor stride, string id). Raises KeyStateError (a RuntimeError) if unset."""
        stride, name = self.key
        return list(stride), name

    def set_key(self, key: Any, name: str | None = None) -> None:
        """Accepts (tensor_stride, string_id) as two arguments or one pair."""
        stride: Sequence[int]
        stride, name = (key, name) if name is not None else key
        if len(stride) + 1 != self._size:
            raise ContractError(
                f"tensor stride {list(stride)} for a key of coordinate size {self._size}; "
                f"expected {self._size - 1} entries."
            )
        self._key = (tuple(int(s) for s in stride), str(name))

    def get_tensor_stride(self) -> list[int]:
        return list(self.key[0])

    def get_coordinate_size(self) -> int:
        """D + 1."""
        return self._size

    def __getstate__(self) -> tuple[Key | None, int]:
        return self._key, self._size

    def __setstate__(self, state: tuple[Key | None, int]) -> None:
        self._key, self._size = state

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CoordinateMapKey):
            raise DataTypeError(f"a coordinate map key compared with {type(other).__name__}; compare keys only.")
        return self._key is not None and self._key == other._key

    # Written out for torch.compile: strides may be symbols, and what Python would derive of
    # `__eq__` takes its result for a constant.
    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._key) if self._key is not None else hash(self._size)

    def __repr__(self) -> str:
        if self._key is None:
            return f"coordinate map key: unset, size {self._size}"
        stride, name = self._key
        return f"coordinate map key:{list(stride)}" + (f":{name}" if name else "")


class CoordsKey(CoordinateMapKey):
    """The key of 0.4: CoordsKey(D) is unset; a manager's `initialize` sets it.

    `getKey` and `setKey` deal in numbers, which say no more than whether keys are equal.
    """

    __slots__ = ("_stride",)

    def __init__(self, D: int) -> None:
        profile.saw_old("CoordsKey(D)")
        super().__init__(int(D) + 1)
        self._stride = (1,) * int(D)

    @classmethod
    def of(cls, key: Key | None) -> CoordsKey:
        coords_key = object.__new__(cls)
        coords_key._key, coords_key._stride = key, () if key is None else key[0]
        coords_key._size = len(coords_key._stride) + 1
        return coords_key

    @property
    def D(self) -> int:
        return self._size - 1

    def isKeySet(self) -> bool:
        return self.is_key_set()

    def getKey(self) -> int:
        """Raises KeyStateError if unset."""
        stride, name = self.key
        return int(name) if name.isdecimal() else zlib.crc32(repr((stride, name)).encode())

    def setKey(self, key: int) -> None:
        self._key = (self._stride, str(int(key)))

    def getTensorStride(self) -> list[int]:
        return list(self._stride if self._key is None else self._key[0])

    def setTensorStride(self, tensor_stride: Any) -> None:
        self._stride = tuple(int_list(tensor_stride, self.D, "tensor_stride"))
        if self._key is not None:
            self._key = (self._stride, self._key[1])

    def set_key(self, key: Any, name: str | None = None) -> None:
        super().set_key(key, name)
        self._stride = self.key[0]

    def __getstate__(self) -> Any:
        return self._key, self._size, self._stride

    def __setstate__(self, state: Any) -> None:
        self._key, self._size, self._stride = state


CoordsKey.__module__ = "MinkowskiEngine.MinkowskiCoords"
CoordinateMapKey.__module__ = "MinkowskiEngineBackend._C"


def given_by(key: CoordinateMapKey | None) -> Key | None:
    """The output map that a caller asks for: None where the key is unset or left out."""
    return None if key is None else key._key


def fill(key: CoordinateMapKey | None, out_key: Key) -> None:
    """Tell the caller the output map, if the key that came along was unset."""
    if key is not None and key._key is None:
        key.set_key(*out_key)
