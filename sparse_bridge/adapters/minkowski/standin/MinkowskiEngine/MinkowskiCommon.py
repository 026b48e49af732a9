"""Arguments and the base class that all modules share."""

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import Module

from sparse_bridge.adapters.minkowski.geometry import int_list
from sparse_bridge.core.traced.scripts import refuse_script
from sparse_bridge.errors import UnsupportedError

__all__ = [
    "MinkowskiModuleBase",
    "StrideType",
    "convert_to_int_list",
    "convert_to_int_tensor",
    "get_minkowski_function",
    "get_postfix",
    "int_dtypes",
    "prep_args",
]

StrideType = int | Sequence | np.ndarray | torch.Tensor
int_dtypes = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def convert_to_int_list(arg, dimension, name="argument"):
    """One int per axis from a number, sequence, array or tensor.  name: of it, for errors."""
    return int_list(arg, dimension, name)


def convert_to_int_tensor(arg, dimension):
    """`convert_to_int_list` as a CPU IntTensor."""
    return torch.tensor(int_list(arg, dimension), dtype=torch.int32)


def prep_args(tensor_stride, stride, kernel_size, dilation, region_type, D=-1):
    """Tensor strides, strides, kernel sizes, dilations as IntTensors, and the region type."""
    numbers = [convert_to_int_tensor(v, D) for v in (tensor_stride, stride, kernel_size, dilation)]
    return (*numbers, region_type)


def get_postfix(tensor):
    """Suffix of the backend function for a tensor's device."""
    return "GPU" if tensor.is_cuda else "CPU"


def get_minkowski_function(name, variable):
    """Backend functions by name are part of the compiled module, which sparse_bridge replaces."""
    raise UnsupportedError(
        f"the compiled function {name}{get_postfix(variable)} is not available; call the autograd "
        "function or module of the same operation."
    )


class MinkowskiModuleBase(Module):
    """Base of every layer."""

    __prepare_scriptable__ = refuse_script
