"""Points to voxels, in numpy."""

import math
from itertools import repeat

import numpy as np

from sparse_bridge.adapters.torchsparse import profile
from sparse_bridge.errors import ContractError, GeometryError, OverflowLimitError

__all__ = ["ravel_hash", "sparse_quantize"]


def ravel_hash(x):
    """One number for every row of numbers [N, D], uint64 [N]: its cell in the box around all rows,
    the first column slowest. Differences to the smallest values are rounded down.

    Release 1.4 subtracts the smallest values from `x` itself.
    """
    if not isinstance(x, np.ndarray) or x.ndim != 2 or x.dtype.kind not in "iuf":
        argument = f"{x.dtype} {x.shape}" if isinstance(x, np.ndarray) else type(x).__name__
        raise ContractError(f"ravel_hash got {argument}; expected an array of numbers, [N, D].")
    keys = np.zeros(len(x), np.uint64)
    if len(x) == 0:
        return keys
    low = x.min(0)
    if x.dtype.kind == "f":
        cells = x - low
    else:  # modulo 2^64, so that no difference overflows
        cells = x.astype(np.uint64) - low.astype(np.uint64)
    most = cells.max(0)
    if not np.isfinite(most).all():
        raise ContractError("ravel_hash got numbers that are not finite.")
    sizes = [int(cell) + 1 for cell in most]
    if math.prod(sizes) > 1 << 64:
        raise OverflowLimitError(f"rows in a box of {sizes} have more than 2^64 cells.")
    for column, size in zip(cells.T, sizes, strict=True):
        keys = keys * np.uint64(size % (1 << 64)) + column.astype(np.uint64)
    if profile.current().name == "1.4":
        x -= low
    return keys


def sparse_quantize(coords, voxel_size=1, *, return_index=False, return_inverse=False):
    """Distinct voxels of points [N, 3] in lexicographic order, int32 [M, 3].

    return_index: also the first point of each voxel, int64 [M].  return_inverse: also the voxel of
    each point, int64 [N]. Release 1.4 shifts the voxels so that each axis starts at 0.
    """
    if isinstance(voxel_size, (int, float)):
        voxel_size = tuple(repeat(voxel_size, 3))
    if not isinstance(voxel_size, tuple) or len(voxel_size) != 3:
        raise ContractError(
            f"voxel_size is {voxel_size!r} ({type(voxel_size).__name__}); expected an int, a float or a tuple of three."
        )
    if any(size == 0 or size != size for size in voxel_size):
        raise GeometryError(f"voxel_size is {voxel_size}; expected sizes other than 0.")
    coords = np.asarray(coords)
    if coords.ndim != 2 or coords.shape[1] != 3:
        raise ContractError(f"points have shape {coords.shape}; expected (N, 3).")
    cells = np.floor(coords / np.asarray(voxel_size))
    if not (np.abs(cells) < 2**31).all():
        raise OverflowLimitError(
            f"points of {voxel_size} a voxel leave the 32-bit range, or are not finite; drop them."
        )
    cells = cells.astype(np.int32)
    voxels, first, inverse = np.unique(cells, axis=0, return_index=True, return_inverse=True)
    if profile.current().name == "1.4" and len(voxels):
        voxels = voxels - cells.min(0)
    outputs = [voxels.astype(np.int32)]
    if return_index:
        outputs.append(first)
    if return_inverse:
        outputs.append(inverse.reshape(-1))
    return outputs[0] if len(outputs) == 1 else outputs
