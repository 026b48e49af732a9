"""Results of calls: as lists, and in forms that no row order changes."""

from __future__ import annotations

import numpy as np

from tests.goldens.compare import numpy_of


def listed(value, whole=False, then=(), copy=False):
    """The results of a call: its items unless `whole`, after a chain of methods.

    copy: they are views of buffers that the next call overwrites.
    """
    items = list(value) if isinstance(value, (tuple, list)) and not whole else [value]
    for name, keywords in then:
        items = [getattr(item, name)(**keywords) for item in items]
    return [numpy_of(item) for item in items] if copy else items


def order_free(voxels, indices, counts, ids=None):
    """Voxels by coordinate, the points of each sorted, ids as coordinates."""
    order = np.lexsort(indices.T[::-1])
    points = [voxels[row][: counts[row]] for row in order]
    points = [p[np.lexsort(p.T[::-1])] for p in points]
    where = None if ids is None else np.where(ids[:, None] < 0, -1, indices[np.maximum(ids, 0)])
    flat = np.concatenate(points) if points else voxels.reshape(-1, voxels.shape[-1])
    return indices[order], counts[order], flat, where


def pair_rows(out_indices, pairs, counts):
    """Index pairs as rows (offset, input row, output coordinate)."""
    rows = []
    for offset in range(pairs.shape[1]):
        inputs, outputs = pairs[:, offset, : int(counts[offset])]
        offsets = np.full((len(inputs), 1), offset)
        rows.append(np.concatenate([offsets, inputs[:, None], out_indices[outputs]], axis=1))
    return np.concatenate(rows)
