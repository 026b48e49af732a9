"""Hash helpers and point-voxel functions with each release's layouts; hash tables; map builders."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge.errors import SparseBridgeError
from tests import checks

from . import oracle
from .conftest import DEVICES
from .test_conv import points, triple

ONE = (1, 1, 1)


def test_hash_layout(ts):
    F = ts.nn.functional
    coords = points(ts.release, low=(-3, -2, -4))
    offsets = ts.nn.utils.get_kernel_offsets(3)
    first = 1 if ts.release == "2.1" else 0
    plain, moved = F.sphash(coords), F.sphash(coords, offsets)
    assert plain.dtype == torch.int64 and plain.shape == (len(coords),)
    assert moved.shape == (27, len(coords)) and torch.equal(moved[13], plain)
    for k, offset in enumerate(offsets):
        rows = coords.clone()
        rows[:, first : first + 3] += offset
        assert torch.equal(moved[k], F.sphash(rows))
    assert len(plain.unique()) == len(coords)
    assert bool((plain >= 0).all()) is (ts.release != "2.1")
    for wrong in ((coords.long(),), (coords.float(),), (coords[:, :3],), (coords, offsets.long())):
        with pytest.raises(AssertionError) as caught:
            F.sphash(*wrong)
        assert isinstance(caught.value, SparseBridgeError)


def test_query_and_count(ts):
    F = ts.nn.functional
    found = F.sphashquery(torch.tensor([[5, 7], [9, 5]]), torch.tensor([9, 5, 5]))
    assert found.tolist() == [[1, -1], [0, 1]]
    assert found.dtype == (torch.int32 if ts.release == "2.1" else torch.int64)
    counts = F.spcount(torch.tensor([0, 2, -1, 2, 9], dtype=torch.int32), 4)
    assert counts.dtype == torch.int32 and counts.tolist() == [1, 0, 2, 0]
    assert F.spcount(counts, torch.tensor(3)).tolist() == [2, 1, 1]
    with pytest.raises(TypeError, match="int64"):
        F.spcount(torch.tensor([0]), 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("outside", [-1, -7, 2, 1 << 30])
def test_indices_outside_of_the_rows(ts, device, outside):
    F = ts.nn.functional
    feats = torch.ones(2, 3, device=device, requires_grad=True)
    index = torch.tensor([1, outside], dtype=torch.int32, device=device)
    counts = F.spcount(index, 2)
    assert counts.tolist() == [0, 1]
    voxels = F.spvoxelize(feats, index, counts)
    assert voxels.tolist() == [[0, 0, 0], [1, 1, 1]]
    corners = index[:, None].expand(2, 8).contiguous()
    points = F.spdevoxelize(feats, corners, torch.ones(2, 8, device=device))
    assert points.tolist() == [[8, 8, 8], [0, 0, 0]]
    (voxels.sum() + points.sum()).backward()
    assert feats.grad.tolist() == [[1, 1, 1], [8, 8, 8]]


def test_trilinear_layout(ts):
    F = ts.nn.functional
    point = torch.tensor([[2.5, 1.0, 3.5, 0.0]])
    index = torch.zeros(1, 8, dtype=torch.int32)
    want = [[0.09375, 0.28125, 0.09375, 0.28125, 0.03125, 0.09375, 0.03125, 0.09375]]
    if ts.release == "2.1":
        got = F.calc_ti_weights(point, index, scale=2)
    else:
        got = F.calc_ti_weights(point, index.t(), scale=2).t()
        with pytest.raises(ValueError, match="expected"):
            F.calc_ti_weights(point.repeat(2, 1), index.repeat(2, 1), scale=2)
    torch.testing.assert_close(got, torch.tensor(want))
    from torchsparse.nn.functional.devoxelize import calc_ti_weights

    assert calc_ti_weights is F.calc_ti_weights


@pytest.mark.parametrize("device", DEVICES)
def test_voxels_and_points_of_a_layer(ts, device):
    """Initial voxelisation and trilinear reading as user code writes it, against plain loops."""
    F, first = ts.nn.functional, 1 if ts.release == "2.1" else 0
    batch_column = 0 if ts.release == "2.1" else 3
    generator = torch.Generator().manual_seed(1)
    coords = torch.rand(80, 4, generator=generator) * 4 - 2
    coords[:, batch_column] = torch.randint(0, 2, (80,), generator=generator).float()
    feats = torch.randn(80, 5, generator=generator, dtype=torch.float64)
    ours, theirs = (feats.clone().to(d).requires_grad_() for d in (device, "cpu"))
    cells = torch.floor(coords).int()
    keys = F.sphash(cells.to(device))
    unique = torch.unique(keys)
    index = F.sphashquery(keys, unique)
    counts = F.spcount(index.int(), len(unique))
    voxels = torch.round(F.spvoxelize(torch.floor(coords).to(device), index, counts)).int()
    means = F.spvoxelize(ours, index, counts)
    want = {}
    for i, cell in enumerate(cells.tolist()):
        want.setdefault(tuple(cell), []).append(i)
    assert {tuple(v) for v in voxels.tolist()} == set(want)
    rows = [want[tuple(v)] for v in voxels.tolist()]
    expected = torch.stack([theirs[r].mean(0) for r in rows])
    checks.assert_close(means, expected, torch.float64)

    offsets = ts.nn.utils.get_kernel_offsets(2, 1, 1, device)
    if ts.release == "2.1":
        around = cells.to(device).unsqueeze(1).repeat(1, 8, 1)
        around[:, :, first:] += offsets
        query = torch.stack([F.sphash(c.contiguous()) for c in around.unbind(1)], 1)
        idx = F.sphashquery(query, F.sphash(voxels))
        weights = F.calc_ti_weights(coords[:, 1:].to(device), idx)
    else:
        idx = F.sphashquery(F.sphash(cells.to(device), offsets), F.sphash(voxels))
        weights = F.calc_ti_weights(coords.to(device), idx)
        idx, weights = idx.t().contiguous(), weights.t().contiguous()
    out = F.spdevoxelize(means, idx, weights.to(means.dtype))
    place = {tuple(v): i for i, v in enumerate(voxels.tolist())}
    final = []
    for i in range(80):
        total, parts = 0.0, []
        for offset in offsets.tolist():
            site = cells[i].tolist()
            for axis in range(3):
                site[first + axis] += offset[axis]
            if tuple(site) in place:
                w = 1.0
                for axis in range(3):
                    part = float(coords[i, first + axis]) % 1
                    w *= part if offset[axis] else 1 - part
                total += w
                parts.append((w, place[tuple(site)]))
        assert int((idx[i] >= 0).sum()) == len(parts)
        final.append(sum(w / (total + 1e-8) * expected[j] for w, j in parts))
    final = torch.stack(final)
    assert (out.detach().cpu() - final).abs().max() < 1e-5
    up = torch.randn(final.shape, generator=generator, dtype=torch.float64)
    out.backward(up.to(device))
    final.backward(up)
    assert (ours.grad.cpu() - theirs.grad).abs().max() < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_hash_table_of_coordinates(ts21, device):
    from torchsparse.backend import GPUHashTable, GPUHashTable32

    coords = points("2.1", seed=5).to(device)
    queries = torch.cat([coords[:9], coords[:3], coords[:4] + 50])
    keys = torch.zeros(2 * len(coords), dtype=torch.int64, device=device)
    vals = torch.zeros(2 * len(coords), dtype=torch.int32, device=device)
    row_of = {tuple(c): i for i, c in enumerate(coords.tolist())}
    for kernel, stride in ((2, 1), (3, 1), ((3, 1, 2), (2, 1, 1))):
        kernel, stride = triple(kernel), triple(stride)
        volume = kernel[0] * kernel[1] * kernel[2]
        for table in (GPUHashTable(keys, vals), GPUHashTable(64), GPUHashTable32(keys, vals)):
            table.insert_coords(coords[:, [1, 2, 3, 0]])
            found = table.lookup_coords(
                queries[:, [1, 2, 3, 0]],
                torch.tensor(kernel, dtype=torch.int32, device=device),
                torch.tensor(stride, dtype=torch.int32, device=device),
                volume,
            )
            assert found.dtype == torch.int32 and found.shape == (128, volume)
            want = torch.zeros(128, volume, dtype=torch.int32)
            for i, (b, *p) in enumerate(queries.tolist()):
                for v, t in enumerate(oracle.offsets_of(kernel)):
                    q = (c * s + o - (k - 1) // 2 for c, s, o, k in zip(p, stride, t, kernel, strict=True))
                    want[i, v] = row_of.get((b, *q), -1) + 1
            assert torch.equal(found.cpu(), want)
    with pytest.raises(ValueError, match="27 offsets, not 8"):
        table.lookup_coords(queries[:, [1, 2, 3, 0]], 3, 1, 8)
    with pytest.raises(AssertionError, match="before insert_coords"):
        GPUHashTable(4).lookup_coords(queries, 3, 1, 27)


def test_hash_table_of_keys(ts21):
    table = ts21.backend.GPUHashTable(100)
    with pytest.raises(AssertionError, match="before insert_vals"):
        table.lookup_vals(torch.zeros(1, dtype=torch.int64))
    table.insert_vals(torch.tensor([7, -5, 7, 11]))
    found = table.lookup_vals(torch.tensor([11, 7, 8, -5]))
    assert found.dtype == torch.int32 and found.shape == (128,)
    assert found[:5].tolist() == [4, 1, 0, 2, 0]


def test_downsampling(ts):
    F = ts.nn.functional
    coords = points(ts.release, seed=6)
    sites = oracle.to_sites(coords, ts.release)
    for stride, kernel in ((2, 2), (2, 3), (3, 3), ((2, 1, 2), 2), ((1, 2, 1), (1, 3, 1))):
        step, size = triple(stride), triple(kernel)
        got = oracle.to_sites(F.spdownsample(coords, stride, kernel), ts.release)
        if ts.release == "2.1":
            want = oracle.new_sites(sites, size, step, (0, 0, 0), None, "hashmap", "spconv")
            floor = F.spdownsample(coords, stride, kernel, downsample_mode="minkowski")
            cells = oracle.new_sites(sites, size, step, None, None, "hashmap", "minkowski")
            assert oracle.to_sites(floor, "2.1") == sorted(cells)
        else:
            want = oracle.old_sites(sites, size, step, ONE, ts.release)
        assert got == sorted(want)
    assert F.spdownsample(coords, 1, 3) is coords
    if ts.release == "2.1":
        got = F.spdownsample(coords, 2, 3, (1, 1, 1), (2, 6, 5, 7))
        want = oracle.new_sites(sites, (3, 3, 3), (2, 2, 2), ONE, (6, 5, 7), "hashmap", "spconv")
        assert oracle.to_sites(got, "2.1") == sorted(want)


def test_map_builders(ts):
    F = ts.nn.functional
    coords = points(ts.release, seed=7)
    sites = oracle.to_sites(coords, ts.release)
    for kernel, stride in ((3, 1), (2, 2)):
        size, step = triple(kernel), triple(stride)
        if ts.release == "2.1":
            kmap = F.build_kernel_map(coords, len(coords), kernel, stride, spatial_range=None)
            nbmaps, nbsizes, out = kmap["nbmaps"], kmap["nbsizes"], kmap["coords"]
            mode = "hashmap"
        else:
            nbmaps, nbsizes, out = F.build_kernel_map(coords, kernel, stride)
            mode = "otf"
        want, triples = oracle.layer(sites, size, step, (0, 0, 0), ONE, ts.release, None, mode)
        assert oracle.to_sites(out, ts.release) == want
        v = torch.arange(len(nbsizes)).repeat_interleave(nbsizes.long())
        found = torch.cat([v.unsqueeze(1), nbmaps.long()], 1).tolist()
        assert sorted(map(tuple, found)) == sorted(triples)
        if ts.release == "2.1":
            table = kmap["out_in_map"]
            back = F.convert_transposed_out_in_map(table, len(coords))
            assert F.transpose_kernel_map(kmap) is kmap and torch.equal(kmap["out_in_map_t"], back)
            j, v = (table >= 0).nonzero(as_tuple=True)
            assert torch.equal(back[table[j, v].long(), v], j.int())
            plain = {"out_in_map": table, "sizes": kmap["sizes"]}
            assert torch.equal(F.transpose_kernel_map(plain)["out_in_map_t"], back)
    with pytest.raises(NotImplementedError, match="grid"):
        F.build_kernel_map(coords, *([9] if ts.release == "2.1" else []), mode="grid")
    with pytest.raises(TypeError, match="no argument 'nonesuch'"):
        F.build_kernel_map(coords, nonesuch=1)
