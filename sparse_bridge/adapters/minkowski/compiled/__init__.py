"""Layers of MinkowskiEngine while a program is traced: by `torch.compile` or `torch.export`.

Keys are worked out while the program is traced, as a manager would give them; coordinates and maps
are operators. A graph has managers of its own, which it fills from the coordinates that its first
layer sees; the user's manager holds, in `traced`, what the graph knows of the maps.
"""

from ....core.compile import row_functions as row_functions  # registers operators
from ....core.traced.graphs import outside as outside
from .convolution import convolved, graph_output_key
from .pools import pooled, pooled_globally
from .registered_maps import all_traced, coords_of, inserted, traced_sites
from .rows import broadcast, interpolated, merged, pruned

__all__ = [
    "all_traced",
    "broadcast",
    "convolved",
    "coords_of",
    "graph_output_key",
    "inserted",
    "interpolated",
    "merged",
    "outside",
    "pooled",
    "pooled_globally",
    "pruned",
    "traced_sites",
]
