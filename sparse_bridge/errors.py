"""Typed errors. Every one says what was got, what was expected and what to do about it.

The subclasses also derive from the built-in exception that the bridged frameworks raise in the same
situation, so that `except AssertionError` or `except ValueError` in existing code keeps working.
"""

from __future__ import annotations


class SparseBridgeError(Exception):
    """Base of every error raised on purpose by sparse_bridge."""


class ShapeError(SparseBridgeError, ValueError):
    """A tensor has the wrong rank, row count or channel count."""


class DataTypeError(SparseBridgeError, TypeError):
    """A tensor has a dtype that the operation does not take."""


class TensorExpectedError(DataTypeError, AssertionError, AttributeError):
    """Something else stands where a `torch.Tensor` belongs, such as a numpy array."""


class SparseInputError(DataTypeError, AttributeError):
    """Something else stands where a sparse tensor of the framework belongs."""


class DeviceError(SparseBridgeError, RuntimeError):
    """Tensors of one operation live on different devices, or the device cannot do the work."""


class CoordinateError(SparseBridgeError, ValueError):
    """Coordinates are out of range, or two coordinate sets do not belong together."""


class GeometryError(SparseBridgeError, ValueError):
    """Kernel size, stride, dilation or spatial shape do not fit the map or each other."""


class OverflowLimitError(SparseBridgeError, OverflowError):
    """A size leaves the range that can be indexed; nothing was truncated."""


class ContractError(SparseBridgeError, AssertionError):
    """A call breaks the framework's own rules where the framework itself asserts."""


class KernelError(SparseBridgeError, RuntimeError):
    """A GPU kernel could not be built or reported a failure."""


class UnsupportedError(SparseBridgeError, NotImplementedError):
    """The framework offers this, sparse_bridge does not (yet)."""


class SettingError(SparseBridgeError, ValueError):
    """An environment variable or option has a value outside its allowed set."""


class LifecycleError(SparseBridgeError, RuntimeError):
    """`enable` / `disable` were asked for something that contradicts the current state."""


class ModelError(SparseBridgeError, ValueError):
    """A model cannot be prepared as it is: `optimize` has done so already, or another forward stands in its place."""


class MemoryLimitError(SparseBridgeError, MemoryError):
    """An operation does not fit under the limit of `sparse_bridge.memory_limit`, or others than the
    bridge's have exceeded it.

    All in bytes.  limit: that is in force, or was.  asked: what the operation takes in one piece,
    with all that is held beside it.  least: the lowest limit under which it runs. Of others both
    are the process's peak so far.
    """

    def __init__(self, text: str, limit: int = 0, asked: int = 0, least: int = 0) -> None:
        super().__init__(text)
        self.limit, self.asked, self.least = limit, asked, least


def require_type(call: str, value: object, kind: type, expected: str) -> None:
    """Raises DataTypeError unless an argument of `call` is of that kind."""
    if not isinstance(value, kind):
        raise DataTypeError(f"{call} got {type(value).__name__}; expected {expected}.")


def tensor_expected(value: object, name: str, caller: str = "") -> TensorExpectedError:
    """The error of an argument that is no tensor: what it is, and how to make one of it.  caller: whose argument."""
    kind = type(value)
    got = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    numpys = any(base.__module__ == "numpy" and base.__qualname__ == "ndarray" for base in kind.__mro__)
    maker = "from_numpy" if numpys else "tensor" if kind in (list, tuple) else "from_dlpack"
    made = numpys or kind in (list, tuple) or hasattr(kind, "__dlpack__")
    advice = f"torch.{maker}({name}) makes one" if made else "pass a tensor"
    return TensorExpectedError(f"{caller and caller + ': '}torch.Tensor expected for {name}, got {got}; {advice}.")
