"""The enumerations of MinkowskiEngine, with their integer values."""

from __future__ import annotations

import enum
from typing import Any

from ....errors import ContractError

_BACKEND = "MinkowskiEngineBackend._C"


class _Named(enum.IntEnum):
    """Prints its name, as upstream's do; Python from 3.11 would print the number."""

    __str__ = enum.Enum.__str__

    def __format__(self, spec: str) -> str:
        return format(self.value, spec) if spec else str(self)


class MinkowskiAlgorithm(_Named):
    DEFAULT = 0
    MEMORY_EFFICIENT = 1
    SPEED_OPTIMIZED = 2


class GPUMemoryAllocatorType(_Named):
    PYTORCH = 0
    CUDA = 1


class CoordinateMapType(_Named):
    CPU = 0
    CUDA = 1


class RegionType(_Named):
    """Kernel shapes. HYPERCUBE, HYPERCROSS and HYBRID (by `axis_types`) are names of 0.4."""

    HYPER_CUBE = 0
    HYPER_CROSS = 1
    CUSTOM = 2
    HYBRID = 3
    HYPERCUBE = 0
    HYPERCROSS = 1


class ConvolutionMode(_Named):
    DEFAULT = 0
    DIRECT_GEMM = 1
    COPY_GEMM = 2


class PoolingMode(_Named):
    LOCAL_SUM_POOLING = 0
    LOCAL_AVG_POOLING = 1
    LOCAL_MAX_POOLING = 2
    GLOBAL_SUM_POOLING_DEFAULT = 3
    GLOBAL_AVG_POOLING_DEFAULT = 4
    GLOBAL_MAX_POOLING_DEFAULT = 5
    GLOBAL_SUM_POOLING_KERNEL = 6
    GLOBAL_AVG_POOLING_KERNEL = 7
    GLOBAL_MAX_POOLING_KERNEL = 8
    GLOBAL_SUM_POOLING_PYTORCH_INDEX = 9
    GLOBAL_AVG_POOLING_PYTORCH_INDEX = 10
    GLOBAL_MAX_POOLING_PYTORCH_INDEX = 11


class BroadcastMode(_Named):
    ELEMENTWISE_ADDITON = 0  # upstream's spelling
    ELEMENTWISE_MULTIPLICATION = 1


class OperationType(_Named):
    """0.4's `BroadcastMode`."""

    ADDITION = 0
    MULTIPLICATION = 1


class GlobalPoolingMode(_Named):
    """How 0.4 computed a global pool; all of them give the same."""

    AUTO = 0
    INDEX_SELECT = 1
    SPARSE = 2


class MemoryManagerBackend(_Named):
    """0.4's `GPUMemoryAllocatorType`."""

    CUDA = 0
    PYTORCH = 1


class SparseTensorOperationMode(enum.Enum):
    """SEPARATE_COORDS_MANAGER and SHARE_COORDS_MANAGER are names of 0.4."""

    SEPARATE_COORDINATE_MANAGER = 0
    SHARE_COORDINATE_MANAGER = 1
    SEPARATE_COORDS_MANAGER = 0  # noqa: PIE796
    SHARE_COORDS_MANAGER = 1  # noqa: PIE796


class SparseTensorQuantizationMode(enum.Enum):
    RANDOM_SUBSAMPLE = 0
    UNWEIGHTED_AVERAGE = 1
    UNWEIGHTED_SUM = 2
    NO_QUANTIZATION = 3
    MAX_POOL = 4
    SPLAT_LINEAR_INTERPOLATION = 5


for _enum in (
    MinkowskiAlgorithm,
    GPUMemoryAllocatorType,
    CoordinateMapType,
    RegionType,
    ConvolutionMode,
    PoolingMode,
    BroadcastMode,
    OperationType,
    GlobalPoolingMode,
    MemoryManagerBackend,
):
    _enum.__module__ = _BACKEND  # where pickles look for them
    # Upstream's are pybind11 enumerations, whose table of members some projects read.
    setattr(_enum, "__entries", {name: (member, None) for name, member in _enum.__members__.items()})
SparseTensorOperationMode.__module__ = "MinkowskiEngine.MinkowskiTensor"
SparseTensorQuantizationMode.__module__ = "MinkowskiEngine.MinkowskiTensor"


def checked(name: str, value: Any, *enumerations: type) -> Any:
    """A switch's value, if it is a member of its enumeration. Raises: ContractError."""
    if not isinstance(value, enumerations):
        expected = " or ".join(enumeration.__name__ for enumeration in enumerations)
        raise ContractError(f"{name} is {value!r}; expected a {expected}.")
    return value


def member(name: str, value: Any, enumeration: type[enum.IntEnum]) -> Any:
    """The member of an enumeration, also given by its number. Raises: ContractError."""
    try:
        return enumeration(value)
    except ValueError:
        names = ", ".join(enumeration.__members__)
        raise ContractError(f"{name} is {value!r}; expected one of {names} ({enumeration.__name__}).") from None


def base_mode(mode: PoolingMode) -> str:
    """ "sum", "avg" or "max"."""
    return ("sum", "avg", "max")[int(mode) % 3]
