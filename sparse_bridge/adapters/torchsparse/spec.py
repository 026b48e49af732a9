"""What the arguments of a convolution fix, worked out once per set of arguments."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from ...errors import ContractError, DataTypeError, GeometryError, ShapeError
from . import profile as profiles
from .profile import Profile

__all__ = ["ONE", "ConvSpec", "MapKey", "Triple", "spec_of", "triple"]

Triple = tuple[int, int, int]
MapKey = tuple[Triple, Triple, Triple, Triple]
ONE = (1, 1, 1)


def triple(value: Any, name: str) -> Triple:
    """An int, or three of them, as a tuple of Python ints. Raises ShapeError, DataTypeError."""
    if isinstance(value, (list, tuple, torch.Size)):
        numbers = tuple(int(n) for n in value)
    elif isinstance(value, torch.Tensor):
        numbers = tuple(int(n) for n in value.flatten().tolist())
    elif isinstance(value, (str, type(None))):
        raise DataTypeError(f"{name} is {value!r}; expected one number or three.")
    else:
        numbers = (int(value),) * 3
    if len(numbers) != 3:
        raise ShapeError(f"{name} is {value!r}; expected one number or three.")
    return numbers  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ConvSpec:
    """The geometry of a convolution under one release. Equal arguments give the same object.

    kernel, stride, padding, dilation: along x, y, z; padding counts in 2.1 only, dilation is part
    of the cache key alone.  pointwise: no map is needed.  levels: what `level` has answered, by
    tensor stride.
    """

    release: Profile
    kernel: Triple
    stride: Triple
    padding: Triple
    dilation: Triple
    transposed: bool
    generative: bool
    pointwise: bool
    levels: dict[Any, tuple[Triple, MapKey]] = dataclasses.field(default_factory=dict)

    def level(self, tensor_stride: Any) -> tuple[Triple, MapKey]:
        """(tensor stride of the outputs, key of the map in `kmaps`) for inputs at a tensor stride.

        The key is that of the forward layer: it starts with the finer one. Raises ShapeError.
        """
        in_stride = triple(tensor_stride, "the tensor stride")
        entry = self.levels.get(in_stride)
        if entry is None:
            pairs = zip(in_stride, self.stride, strict=True)
            out_stride: Any = tuple(t // s if self.transposed else t * s for t, s in pairs)
            fine = out_stride if self.transposed else in_stride
            entry = out_stride, (fine, self.kernel, self.stride, self.dilation)
            self.levels[in_stride] = entry
        return entry


def spec_of(kernel_size: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, generative: bool) -> ConvSpec:
    """The spec of these arguments under the profile in force.

    Raises ShapeError, GeometryError for numbers below 1, and ContractError for a generative layer that is not
    transposed.
    """
    release = profiles.settled or profiles.current()
    arguments = kernel_size, stride, padding, dilation
    # compilers trace what is cached, and warn of the cache
    spec = _spec.__wrapped__ if torch.compiler.is_compiling() else _spec
    try:
        if torch.Tensor not in [type(value) for value in arguments]:
            return spec(release, *arguments, transposed, generative)
    except TypeError:  # lists are not hashable
        pass
    names = "kernel_size", "stride", "padding", "dilation"
    triples = [triple(value, name) for value, name in zip(arguments, names, strict=True)]
    return spec(release, *triples, transposed, generative)


@functools.lru_cache(maxsize=4096)
def _spec(
    release: Profile, kernel_size: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, generative: bool
) -> ConvSpec:
    if generative and not transposed:
        raise ContractError("generative=True is for transposed layers; pass transposed=True too.")
    kernel, steps, spread = triple(kernel_size, "kernel_size"), triple(stride, "stride"), triple(dilation, "dilation")
    if min(*kernel, *steps, *spread) < 1:
        got = f"kernel size {kernel}, stride {steps}, dilation {spread}"
        raise GeometryError(f"{got}; sizes, dilations and strides start at 1.")
    return ConvSpec(
        release,
        kernel,
        steps,
        triple(padding, "padding") if release.divides else (0, 0, 0),
        spread,
        bool(transposed),
        bool(generative),
        kernel == steps == ONE,
    )
