"""Helpers that spconv's own tests use."""

import itertools
import unittest

import numpy as np


class TestCase(unittest.TestCase):
    def assertAllEqual(self, a, b):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))

    def assertAllClose(self, a, b, rtol=1e-6, atol=1e-6, msg=""):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=atol, err_msg=msg)


def params_grid(*params):
    """Every combination of the given lists."""
    return [list(choice) for choice in itertools.product(*params)]


def generate_sparse_data(
    shape, num_points, num_channels, integer=False, data_range=(-1, 1), with_dense=True, dtype=np.float32, shape_scale=1
):
    """Random features at distinct coordinates, all multiples of `shape_scale`.

    A seed of numpy's gives what it gives upstream: each batch item shuffles the cells as the one
    before left them and takes the first, then come the features of all.

    Returns a dict of features [N, C], indices [N, nd + 1] (batch id last) and, with `with_dense`,
    features_dense [B, C, *shape].
    """
    axes = [np.arange(extent // shape_scale) * shape_scale for extent in shape]
    # Upstream's cells follow one another by the second axis, then the first, then the others.
    cells = np.stack(np.meshgrid(*axes, indexing="xy"), -1).reshape(-1, len(shape))
    if max(num_points) > len(cells):
        raise ValueError(f"{max(num_points)} points do not fit on {len(cells)} cells.")
    coords = []
    for batch, count in enumerate(num_points):
        np.random.shuffle(cells)
        coords.append(np.concatenate([cells[:count], np.full((count, 1), batch)], 1))
    draw = np.random.randint if integer else np.random.uniform
    features = [draw(*data_range, size=(count, num_channels)).astype(dtype) for count in num_points]
    result = {"features": np.concatenate(features), "indices": np.concatenate(coords).astype(np.int32)}
    if with_dense:
        dense = np.zeros((len(num_points), *shape, num_channels), dtype=dtype)
        index = result["indices"]
        dense[(index[:, -1], *index[:, :-1].T)] = result["features"]
        result["features_dense"] = np.ascontiguousarray(np.moveaxis(dense, -1, 1))
    return result
