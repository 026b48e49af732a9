"""Data loading helpers: voxelisation, labels, collation, hashes, sparse products."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparse_bridge.adapters.minkowski.errors import ArgumentValueError
from sparse_bridge.errors import ContractError, CoordinateError


@pytest.fixture
def points():
    generator = np.random.default_rng(0)
    coords = generator.uniform(-2, 2, (300, 3))
    return coords, generator.normal(size=(300, 4)).astype(np.float32), generator.integers(0, 3, 300)


def expected(coords, size=1.0):
    """{voxel: rows} in the order of first rows."""
    voxels = {}
    for row, site in enumerate(np.floor(coords / size).astype(int).tolist()):
        voxels.setdefault(tuple(site), []).append(row)
    return voxels


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("size", [None, 0.5, [0.5, 1.0, 0.25]])
def test_voxels(ME, points, kind, size):
    coords, feats, _ = points
    voxels = expected(coords, 1.0 if size is None else np.array(size))
    first = [rows[0] for rows in voxels.values()]
    given = (coords, feats) if kind == "numpy" else (torch.tensor(coords), torch.tensor(feats))
    found, values, index, inverse = ME.utils.sparse_quantize(
        *given, return_index=True, return_inverse=True, quantization_size=size
    )
    assert isinstance(found, torch.Tensor) and found.dtype == torch.int32
    assert [tuple(site) for site in found.tolist()] == list(voxels)
    assert isinstance(values, np.ndarray if kind == "numpy" else torch.Tensor)
    assert np.array_equal(np.asarray(values), feats[first])
    assert index.tolist() == first and index.dtype == inverse.dtype == torch.int64
    assert all(inverse[row] == number for number, rows in enumerate(voxels.values()) for row in rows)
    alone = ME.utils.sparse_quantize(given[0], quantization_size=size)
    assert torch.equal(alone, found)
    only = ME.utils.sparse_quantize(given[0], quantization_size=size, return_maps_only=True)
    assert torch.equal(only, index)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_labels(ME, points, kind):
    coords, feats, labels = points
    labels[:20] = 255
    voxels = expected(coords)
    want = []
    for rows in voxels.values():
        seen = set(labels[rows].tolist())
        want.append(seen.pop() if len(seen) == 1 else 255)
    assert 255 in want and len(set(want)) > 2
    given = (coords, feats, labels)
    if kind == "torch":
        given = torch.tensor(coords), torch.tensor(feats), torch.tensor(labels).int()
    found, _, voted, index, inverse = ME.utils.sparse_quantize(
        given[0], given[1], labels=given[2], ignore_label=255, return_index=True, return_inverse=True
    )
    assert [tuple(site) for site in found.tolist()] == list(voxels)
    assert voted.tolist() == want
    kinds = [type(v) for v in (found, voted, index, inverse)]
    assert set(kinds) == {np.ndarray if kind == "numpy" else torch.Tensor}
    assert str(voted.dtype) == ("int32" if kind == "numpy" else "torch.int64")


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_labels_and_maps_alone(ME, kind):
    points = np.array([[0, 0, 0], [0, 0, 1], [0, 0, 4]], np.float64)
    labels = np.array([7, 8, 9], np.int32)
    if kind == "torch":
        points, labels = torch.from_numpy(points), torch.from_numpy(labels)
    asked = {"labels": labels, "quantization_size": 2, "return_maps_only": True}
    index = ME.utils.sparse_quantize(points, **asked)
    assert type(index) is type(labels) and index.tolist() == [0, 2]
    assert ME.utils.sparse_quantize(points, return_index=True, **asked).tolist() == [0, 2]
    maps = ME.utils.sparse_quantize(points, return_index=True, return_inverse=True, **asked)
    assert [part.tolist() for part in maps] == [[0, 2], [0, 0, 1]]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_sizes_without_axes_are_numbers(ME, points, kind):
    points = points[0]
    given = points if kind == "numpy" else torch.from_numpy(points)
    want = ME.utils.sparse_quantize(given, quantization_size=0.5)
    for size in (np.array(0.5), torch.tensor(0.5), np.float32(0.5), np.float64(0.5)):
        assert torch.equal(ME.utils.sparse_quantize(given, quantization_size=size), want)
    for size in ([np.array(0.5)] * 3, torch.full((3,), 0.5), [torch.tensor(0.5)] * 3):
        assert torch.equal(ME.utils.sparse_quantize(given, quantization_size=size), want)
    wrong = (
        0,
        -1.0,
        np.nan,
        np.inf,
        "0.5",
        np.array("0.5"),
        [0.5, 0, 0.5],
        np.full((3, 2), 0.5),
        torch.full((3, 2), 0.5),
        {0.5},
        object(),
        np.array(1j),
        torch.tensor(0.0),
        ["a", "b", "c"],
    )
    for size in wrong:
        with pytest.raises(ArgumentValueError, match="quantization_size"):
            ME.utils.sparse_quantize(given, quantization_size=size)
    for size in ([0.5], np.array([0.5]), torch.tensor([0.5]), []):
        with pytest.raises(ContractError, match="entries for 3 axes"):
            ME.utils.sparse_quantize(given, quantization_size=size)


def test_labels_keep_their_numbers(ME, points):
    points = points[0]
    for labels in (np.full(len(points), 1.5), np.full(len(points), 2**40)):
        with pytest.raises(ContractError, match="integers of 32 bits"):
            ME.utils.sparse_quantize(points, labels=labels)
    wide = np.full(len(points), 3, np.int64)
    assert ME.utils.sparse_quantize(points, labels=wide)[1].dtype == np.int32
    with pytest.raises(RuntimeError, match=r"torch\.IntTensor"):
        ME.utils.sparse_quantize(torch.from_numpy(points), labels=wide)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e9])
def test_collation_refuses_coordinates_that_do_not_fit(ME, bad):
    coords = np.array([[0.0, bad]])
    for call in (
        lambda: ME.utils.batched_coordinates([coords]),
        lambda: ME.utils.sparse_collate([coords], [np.ones((1, 1))]),
    ):
        with pytest.raises(CoordinateError, match="32-bit"):
            call()


def test_the_contract_s_own_vote(ME):
    coords = np.array([[0, 0], [0, 0], [1, 0], [2, 0], [2, 0]], dtype=np.int32)
    labels = np.array([5, 5, 6, 7, 8], dtype=np.int32)
    _, voted = ME.utils.sparse_quantize(coords, labels=labels, ignore_label=255)
    assert voted.tolist() == [5, 6, 255]


def test_a_column_of_labels(ME, points):
    """int32 [N, 1], as a stack of scenes gives them, votes like [N]."""
    coords, feats, labels = points
    for given in (labels.astype(np.int32), torch.tensor(labels).int()):
        kind = torch.tensor if isinstance(given, torch.Tensor) else np.asarray
        found = [
            ME.utils.sparse_quantize(kind(coords), kind(feats), labels=part, quantization_size=0.5)
            for part in (given, given.reshape(-1, 1))
        ]
        for one, other in zip(*found, strict=True):
            assert one.shape == other.shape and bool((one == other).all())
    joined = ME.utils.sparse_collate([coords[:4]], [feats[:4]], [torch.ones(4, 1).int()])
    assert joined[2].shape == (4, 1)


def test_collation(ME, points):
    coords, feats, labels = points
    parts = [(coords[:5], feats[:5], labels[:5]), (coords[5:9], feats[5:9], labels[5:9])]
    joined, values, tags = ME.utils.batch_sparse_collate(parts)
    assert joined.tolist() == [
        [b, *np.floor(site).astype(int).tolist()] for b, (sites, _, _) in enumerate(parts) for site in sites
    ]
    assert np.array_equal(values.numpy(), feats[:9]) and tags.tolist() == labels[:9].tolist()
    floats, _ = ME.utils.batch_sparse_collate([p[:2] for p in parts], dtype=torch.float32)
    assert floats.dtype == torch.float32
    np.testing.assert_allclose(floats[:5, 1:].numpy(), coords[:5], rtol=1e-6)
    names = ME.utils.sparse_collate([p[0] for p in parts], [p[1] for p in parts], ["a", "b"])[2]
    assert names == ["a", "b"]
    collate = ME.utils.SparseCollation(limit_numpoints=6)
    tensors = [tuple(torch.as_tensor(v) for v in part) for part in parts]
    assert [len(v) for v in collate(tensors)] == [5, 5, 5]
    assert [len(v) for v in ME.utils.SparseCollation()(tensors)] == [9, 9, 9]


def test_hashes(ME):
    rows = np.random.default_rng(1).integers(-9, 9, (200, 3))
    fnv, ravel = ME.utils.fnv_hash_vec(rows), ME.utils.ravel_hash_vec(rows)
    value = 14695981039346656037
    for c in rows[7].tolist():
        value = ((value * 1099511628211) % 2**64) ^ (c % 2**64)
    assert fnv.dtype == ravel.dtype == np.uint64 and int(fnv[7]) == value
    low, extent = rows.min(0), rows.max(0) - rows.min(0) + 1
    assert np.array_equal(ravel, np.ravel_multi_index((rows - low).T, extent).astype(np.uint64))


def test_unique_map_and_coords_map(ME):
    coords = torch.randint(0, 3, (40, 3)).int()
    unique, inverse = ME.utils.unique_coordinate_map(coords)
    assert torch.equal(coords[unique][inverse], coords)
    distinct = coords[unique].contiguous()
    x = ME.SparseTensor(torch.ones(len(distinct), 1), distinct)
    y = ME.MinkowskiSumPooling(2, 2, dimension=2)(x)
    rows, parents = ME.utils.coords.get_coords_map(x, y)
    assert torch.equal(y.C[parents][:, 1:], x.C[rows][:, 1:] // 2 * 2)


def test_products(ME):
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(0, 5, (30,), generator=generator)
    cols = torch.randint(0, 6, (30,), generator=generator)
    values = torch.randn(30, generator=generator, dtype=torch.float64)
    mat = torch.randn(6, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    dense = torch.zeros(5, 6, dtype=torch.float64)
    dense.index_put_((rows, cols), values, accumulate=True)
    torch.testing.assert_close(ME.spmm(rows, cols, values, [5, 6], mat), dense @ mat)
    check = ME.utils.gradcheck.gradcheck
    assert check(ME.MinkowskiSPMMFunction(), (rows, cols, values, [5, 6], mat))
    assert check(ME.MinkowskiSPMMAverageFunction, (rows.int(), cols.int(), [5, 6], mat))
    counts = torch.bincount(rows, minlength=5).clamp(min=1)
    ones = torch.zeros(5, 6, dtype=torch.float64)
    ones.index_put_((rows, cols), torch.ones(30, dtype=torch.float64), accumulate=True)
    torch.testing.assert_close(
        ME.MinkowskiSPMMAverageFunction.apply(rows, cols, [5, 6], mat), ones @ mat / counts[:, None]
    )
    assert ME.spmm(rows.float(), cols, values, [5, 6], mat).shape == (5, 3)
