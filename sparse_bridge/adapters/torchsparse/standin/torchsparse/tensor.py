"""Sparse tensors and point tensors."""

from collections.abc import Iterable

from torch import Tensor
from torchsparse.utils.tensor_cache import TensorCache, TensorCacheMode, get_global_tensor_cache, get_tensor_cache_mode
from torchsparse.utils.utils import make_ntuple

from sparse_bridge.adapters.lazy_features import LazyFeatures, brief_features, keep
from sparse_bridge.adapters.torchsparse import profile as profiles
from sparse_bridge.adapters.torchsparse.operations import dense, joins
from sparse_bridge.core.geometry.sparse_data import brief
from sparse_bridge.errors import ContractError, DataTypeError

__all__ = ["PointTensor", "SparseTensor"]

_allow_negative_coordinates = False


def get_allow_negative_coordinates():
    """The flag below."""
    return _allow_negative_coordinates


def set_allow_negative_coordinates(allow_negative_coordinates):
    """Kept for its readers: negative coordinates are served either way."""
    global _allow_negative_coordinates
    _allow_negative_coordinates = allow_negative_coordinates


def _forwarded(name):
    """A dictionary of the shared caches under a name of an older release; who assigns to it is written for that."""

    def get(self):
        return getattr(self._caches, name)

    def put(self, value):
        profiles.saw_old_name(f"SparseTensor.{name}")
        setattr(self._caches, name, value)

    return property(get, put, doc=f"`_caches.{name}`")


class SparseTensor(LazyFeatures):
    """Features at sites of a grid.

    feats: [N, C].  coords: int32 [N, 4], rows [b, x, y, z] (2.1) or [x, y, z, b] (up to 2.0).
    stride: tensor stride.  spatial_range: (B, X, Y, Z) or None.
    """

    features_attribute = "feats"
    _late = None
    _own = None  # this class, for layers, whose results are of no subclass

    def __init__(self, feats, coords, stride=1, spatial_range=None):
        self.feats = feats
        self.coords = coords
        self.stride = make_ntuple(stride, ndim=3)
        if spatial_range is not None and not isinstance(spatial_range, Iterable):
            raise DataTypeError(f"spatial_range is {spatial_range!r}; expected (batch, x, y, z) or None.")
        self.spatial_range = None if spatial_range is None else tuple(spatial_range)
        if get_tensor_cache_mode() is TensorCacheMode.GLOBAL_TENSOR_CACHE:
            self._caches = get_global_tensor_cache()
        else:
            self._caches = TensorCache()

    @classmethod
    def _of_parts(cls, feats, coords, stride, spatial_range, caches):
        """A tensor of parts that need no conversion, with the caches of another one."""
        tensor = cls.__new__(cls)
        if type(feats) is Tensor:
            tensor.feats = feats
        else:
            keep(tensor, feats)
        tensor.coords, tensor.stride = coords, stride
        tensor.spatial_range, tensor._caches = spatial_range, caches
        return tensor

    def _with(self, feats):
        """Other features, everything else as here."""
        return self._of_parts(feats, self.coords, self.stride, self.spatial_range, self._caches)

    def __repr__(self):
        within = "" if self.spatial_range is None else f", spatial_range={self.spatial_range}"
        return f"SparseTensor(feats={brief_features(self)}, coords={brief(self.coords)}, stride={self.stride}{within})"

    F = property(lambda self: self.feats, lambda self, value: setattr(self, "feats", value), doc="`feats`")
    C = property(lambda self: self.coords, lambda self, value: setattr(self, "coords", value), doc="`coords`")

    @property
    def s(self):
        """`stride`; assigning takes one number or three."""
        return self.stride

    @s.setter
    def s(self, value):
        self.stride = make_ntuple(value, ndim=3)

    cmaps = _forwarded("cmaps")
    kmaps = _forwarded("kmaps")
    coord_maps = _forwarded("cmaps")
    kernel_maps = _forwarded("kmaps")

    def cpu(self):
        """In place, like all of the following; caches stay where they are."""
        self.coords = self.coords.cpu()
        self.feats = self.feats.cpu()
        return self

    def cuda(self):
        self.coords = self.coords.cuda()
        self.feats = self.feats.cuda()
        return self

    def half(self):
        self.feats = self.feats.half()
        return self

    def detach(self):
        self.coords = self.coords.detach()
        self.feats = self.feats.detach()
        return self

    def to(self, device, non_blocking=True):
        self.coords = self.coords.to(device, non_blocking=non_blocking)
        self.feats = self.feats.to(device, non_blocking=non_blocking)
        return self

    def dense(self):
        """[B, X, Y, Z, C]; needs `spatial_range`."""
        if self.spatial_range is None:
            raise ContractError("dense() needs the tensor's spatial_range (batch, x, y, z); give it to SparseTensor.")
        return dense.to_dense(self.feats, self.coords, self.spatial_range)

    def __add__(self, other):
        return joins.add(self, other)


SparseTensor._own = SparseTensor


class PointTensor:
    """Features at points. coords: float [N, 4], columns x, y, z, batch; dictionaries by stride."""

    def __init__(self, feats, coords, idx_query=None, weights=None):
        self.F = feats
        self.C = coords
        self.idx_query = {} if idx_query is None else idx_query
        self.weights = {} if weights is None else weights
        self.additional_features = {"idx_query": {}, "counts": {}}

    def __repr__(self):
        return f"PointTensor(F={brief(self.F)}, C={brief(self.C)})"

    def cuda(self):
        """In place, like the following."""
        self.F = self.F.cuda()
        self.C = self.C.cuda()
        return self

    def detach(self):
        self.F = self.F.detach()
        self.C = self.C.detach()
        return self

    def to(self, device, non_blocking=True):
        self.F = self.F.to(device, non_blocking=non_blocking)
        self.C = self.C.to(device, non_blocking=non_blocking)
        return self

    def __add__(self, other):
        tensor = PointTensor(self.F + other.F, self.C, self.idx_query, self.weights)
        tensor.additional_features = self.additional_features
        return tensor
