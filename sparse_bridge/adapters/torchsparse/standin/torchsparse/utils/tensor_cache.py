"""The caches that the tensors of one network share."""

from enum import Enum

from sparse_bridge.errors import ContractError

__all__ = [
    "TensorCache",
    "TensorCacheMode",
    "clear_global_tensor_cache",
    "get_global_tensor_cache",
    "get_tensor_cache_mode",
    "set_global_tensor_cache",
    "set_tensor_cache_mode",
]


class TensorCacheMode(Enum):
    """A cache for every tensor that a user makes, or one for all."""

    SEPARATE_TENSOR_CACHE = 0
    GLOBAL_TENSOR_CACHE = 1


class TensorCache:
    """cmaps: sites by tensor stride.  kmaps: kernel maps by (tensor stride, kernel, stride,
    dilation).

    A plain object: projects hang attributes of their own on it. hashmaps stays empty here.
    """

    def __init__(self, cmaps=None, kmaps=None, hashmaps=None):
        self.cmaps = {} if cmaps is None else cmaps
        self.kmaps = {} if kmaps is None else kmaps
        self.hashmaps = {} if hashmaps is None else hashmaps


_mode = TensorCacheMode.SEPARATE_TENSOR_CACHE
_global = TensorCache()


def get_tensor_cache_mode():
    """The mode in force."""
    return _mode


def set_tensor_cache_mode(mode):
    """Choose the mode for tensors made from now on."""
    global _mode
    if not isinstance(mode, TensorCacheMode):
        raise ContractError(f"the cache mode is {mode!r}; expected a TensorCacheMode.")
    _mode = mode


def get_global_tensor_cache():
    """The cache of the global mode."""
    return _global


def set_global_tensor_cache(tensor_cache):
    """Replace it."""
    global _global
    _global = tensor_cache


def clear_global_tensor_cache():
    """Start it anew, as must be done after every iteration in the global mode."""
    global _global
    _global = TensorCache()
