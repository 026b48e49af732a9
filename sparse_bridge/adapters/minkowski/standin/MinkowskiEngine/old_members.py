"""Members that tensors had in MinkowskiEngine 0.4 alone."""

import torch
from MinkowskiEngine.MinkowskiCommon import convert_to_int_list
from MinkowskiEngineBackend._C import CoordinateMapKey

from sparse_bridge.adapters.minkowski import profile, rows
from sparse_bridge.adapters.minkowski.errors import AbsentError
from sparse_bridge.adapters.minkowski.grid import integral
from sparse_bridge.adapters.minkowski.upstream.keys import CoordsKey

__all__ = ["OldSparseTensor", "OldTensor"]


class OldTensor:
    """Names of 0.4 on a tensor of 0.5."""

    __slots__ = ()

    @property
    def coords_man(self):
        """0.4's name of `coordinate_manager`; a CoordsManager."""
        profile.saw_old("x.coords_man")
        if profile.is_old():
            from MinkowskiEngine.MinkowskiCoords import CoordsManager

            if not isinstance(self._manager, CoordsManager):
                self._manager.__class__ = CoordsManager  # made before the profile was known
        return self._manager

    @property
    def coords_key(self):
        """0.4's name of the key; a CoordsKey."""
        profile.saw_old("x.coords_key")
        return CoordsKey.of(self._map_key.key) if profile.is_old() else self._map_key

    def getKey(self):
        """0.4's method for `coords_key`."""
        return self.coords_key

    @property
    def feats(self):
        """0.4's name of `features`."""
        return self._F

    @property
    def coords(self):
        """0.4's name of `coordinates`."""
        return self.C

    @property
    def cpu(self):
        """0.4's method `to("cpu")`. 0.5 has none, and programs ask for it."""
        if not profile.seems_old():
            raise AbsentError("tensors of 0.5 have no cpu(); use to('cpu').")
        return lambda: self.to("cpu")


class OldSparseTensor(OldTensor):
    """Those of a SparseTensor."""

    __slots__ = ()

    def to(self, device):
        """The tensor with a coordinate manager of its own on another device; in 0.4 it moves."""
        device = torch.device(device)
        if device.type == self.device.type and device.index in (None, self.device.index):
            return self
        from MinkowskiEngine.MinkowskiSparseTensor import SparseTensor

        moved = SparseTensor(self._F.to(device), self._sites().to(device), tensor_stride=self.tensor_stride)
        if not profile.is_old():
            return moved
        self._F, self._manager, self._C = moved._F, moved._manager, None
        self.coordinate_map_key = moved.coordinate_map_key
        return self

    def set_tensor_stride(self, s):
        """Say that the coordinates lie on another tensor stride: the tensor moves to a map of its
        own with it, and with the same rows. Raises: ContractError, ArgumentValueError."""
        stride = tuple(convert_to_int_list(s, self._D))
        if list(stride) == self.tensor_stride:
            return
        self.leave_graph()
        key = self._manager._manager.insert(self._sites(), stride)[0]
        self.coordinate_map_key = CoordinateMapKey.of(key)

    def features_at_coords(self, query_coords):
        """0.4's look-up of int32 [M, D + 1]: (features [M, C], 0 where absent; rows found)."""
        grid = self._manager._manager.grid(self.coordinate_map_key.key)
        return rows.look_up(grid, self._F, integral(query_coords.to(self.device)))
