"""The modules of the kernels that build maps, imported at the first look into one: machines without
Triton get as far as here. (An import in a function costs the host 2 us at every call.)"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

__all__ = ["coord_key", "hash_table", "neighbor_lookup", "neighbor_table", "new_rows", "row_ranks", "tile_batch"]

if TYPE_CHECKING:
    from ...kernels.maps import coord_key, hash_table, neighbor_lookup, neighbor_table, new_rows, row_ranks, tile_batch
else:

    class _Module:
        def __init__(self, name: str) -> None:
            self._name = f"sparse_bridge.kernels.maps.{name}"

        def __getattr__(self, name: str) -> Any:
            module = sys.modules.get(self._name) or importlib.import_module(self._name)
            return getattr(module, name)

    coord_key, hash_table, neighbor_lookup, neighbor_table, new_rows, row_ranks, tile_batch = map(_Module, __all__)
