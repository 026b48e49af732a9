"""Sampling against a loop in fp64, codes against the definition, helpers of the extension."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from sparse_bridge.core.ops.serialize import decode, encode
from sparse_bridge.errors import SparseBridgeError

from .conftest import DEVICES
from .test_convolutions import voxels


def sampled(feats, coords, shape, grid, mode):
    first = {}
    for row, site in enumerate(map(tuple, coords.tolist())):
        first.setdefault(site, row)
    out = torch.zeros(*grid.shape[:2], feats.shape[1], dtype=torch.float64)
    for b, line in itertools.product(range(grid.shape[0]), range(grid.shape[1])):
        point = grid[b, line].double()
        if mode == "nearest":
            cells = [(point.trunc().long().tolist(), 1.0)]
        else:
            base = torch.floor(point - 0.5).long()
            cells = []
            for corner in itertools.product((0, 1), repeat=3):
                cell = base + torch.tensor(corner)
                cells.append((cell.tolist(), float((1 - (point - cell - 0.5).abs()).prod())))
        found = [(first[(b, *cell)], w) for cell, w in cells if (b, *cell) in first]
        total = max(sum(w for _, w in found), 1e-12)
        for row, w in found:
            out[b, line] += feats[row].double() * w / total
    return out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["nearest", "trilinear"])
def test_points(flex_gemm, mode, device):
    feats, coords, shape = voxels(120, 5, device=device)
    grid = torch.rand(2, 40, 3) * 9 - 1.4
    feats.requires_grad_()
    out = flex_gemm.ops.grid_sample.grid_sample_3d(feats, coords, shape, grid.to(device), mode)
    leaf = feats.detach().cpu().requires_grad_()
    want = sampled(leaf, coords.cpu(), shape, grid, mode)
    torch.testing.assert_close(out.cpu(), want, rtol=1e-5, atol=1e-5)
    grad = torch.randn(out.shape).double()
    (got,) = torch.autograd.grad(out, feats, grad.to(device))
    (wanted,) = torch.autograd.grad(want, leaf, grad)
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-5, atol=1e-5)


def test_points_that_are_no_points(flex_gemm):
    feats, coords, shape = voxels(209, 3, (6, 7, 5), 1, dtype=torch.float32)
    feats[0] = math.nan  # must not reach points that do not touch its voxel
    nan, far = math.nan, 1e10
    near = (coords[5, 1:] + 0.5).tolist()
    grid = torch.tensor([[[nan, 0, 0], [far, 0, 0], [-far, 0, 0], near]])
    sample = flex_gemm.ops.grid_sample.grid_sample_3d
    out = sample(feats, coords, shape, grid)
    assert out[0, 0].isnan().all() and torch.equal(out[0, 1:3], torch.zeros(2, 3))
    assert torch.equal(out[0, 3], feats[5])
    nearest = sample(feats, coords, shape, grid, mode="nearest")
    assert torch.equal(nearest[0, 1:3], torch.zeros(2, 3))


@pytest.mark.parametrize("mode", ["nearest", "trilinear"])
@pytest.mark.parametrize("rows, points", [(0, 4), (3, 0), (0, 0)])
def test_nothing_to_sample(flex_gemm, mode, rows, points):
    feats, coords, shape = voxels(rows, 3, dtype=torch.float16)
    feats.requires_grad_()
    out = flex_gemm.ops.grid_sample.grid_sample_3d(feats, coords, shape, torch.rand(2, points, 3), mode)
    assert out.shape == (2, points, 3) and out.dtype == torch.float16
    out.sum().backward()


def test_points_of_any_layout(flex_gemm):
    feats, coords, shape = voxels(60, 3)
    grid = torch.rand(3, 20, 2).permute(2, 1, 0) * 6
    sample = flex_gemm.ops.grid_sample.grid_sample_3d
    dense = sample(feats, coords, shape, grid.contiguous())
    assert torch.equal(sample(feats, coords.long(), shape, grid), dense)


def interleaved(batch, axes, bits):
    code = batch
    for level in reversed(range(bits)):
        for axis in axes:
            code = code << 1 | (axis >> level & 1)
    return code


HILBERT = [
    (2, (0, 3, 0, 0), 63),
    (2, (0, 0, 3, 0), 29),
    (2, (0, 0, 0, 3), 9),
    (2, (0, 1, 2, 3), 22),
    (3, (1, 5, 2, 7), 918),
    (6, (2, 63, 0, 63), 748982),
    (10, (0, 1000, 3, 77), 1073473918),
    (11, (0, 2000, 17, 5), 8589888962),
]


@pytest.mark.interpreted
@pytest.mark.emulated
class TestCodes:
    @pytest.mark.parametrize("bits, site, code", HILBERT)
    def test_known_codes(self, map_lane, bits, site, code):
        coords = torch.tensor([site], dtype=torch.int32, device=map_lane.device)
        assert encode(coords, bits, "hilbert", torch.int64).tolist() == [code]

    @pytest.mark.parametrize(
        "bits, dtype",
        [(0, torch.int32), (1, torch.int32), (5, torch.int32), (10, torch.int32), (10, torch.int64), (21, torch.int64)],
    )
    @pytest.mark.parametrize("curve", ["z_order", "hilbert"])
    @pytest.mark.parametrize("n", [1, 255, 257])
    def test_there_and_back(self, map_lane, n, curve, bits, dtype):
        generator = torch.Generator().manual_seed(bits)
        width = 32 if dtype == torch.int32 else 64
        items = 1 << min(30, width - 3 * bits)
        axes = torch.randint(0, 1 << bits, (n, 3), generator=generator)
        batch = torch.randint(0, items, (n, 1), generator=generator)
        coords = torch.cat([batch, axes], 1).int().to(map_lane.device)
        codes = encode(coords, bits, curve, dtype)
        assert torch.equal(decode(codes, bits, curve), coords)
        if curve == "z_order":
            wanted = [interleaved(b, axes, bits) for b, *axes in coords.tolist()]
            top = 1 << (width - 1)
            assert codes.tolist() == [(one + top) % (2 * top) - top for one in wanted]

    def test_neighbours_on_the_hilbert_curve_touch(self, map_lane):
        cells = torch.tensor([(0, *p) for p in itertools.product(range(8), repeat=3)])
        codes = encode(cells.int().to(map_lane.device), 3, "hilbert", torch.int32).cpu().long()
        path = cells[torch.argsort(codes)]
        assert sorted(codes.tolist()) == list(range(512))
        assert torch.equal((path[1:] - path[:-1]).abs().sum(1), torch.ones(511).long())


def test_codes_of_any_layout_and_high_batches(flex_gemm):
    serialize = flex_gemm.ops.serialize
    coords = torch.tensor([[5, 1, 2, 3], [7, 1023, 0, 9]], dtype=torch.int32)
    wide = torch.zeros(4, 2).int()
    wide[:] = coords.t()
    shape = torch.Size((8, 4, 1024, 1024, 1024))
    codes = serialize.encode_seq(wide.t(), shape)
    assert codes.dtype == torch.int64 and torch.equal(serialize.decode_seq(codes, shape), coords)
    one = torch.Size((8, 4, 1, 1, 1))
    single = torch.tensor([[5, 0, 0, 0]], dtype=torch.int32)
    assert serialize.encode_seq(single, one).tolist() == [5]
    assert torch.equal(serialize.decode_seq(serialize.encode_seq(single, one), one), single)
    assert serialize.encode_seq(coords[:0], shape).shape == (0,)
    assert serialize.decode_seq(codes[:0], shape).shape == (0, 4)
    with pytest.raises(SparseBridgeError):
        serialize.encode_seq(coords.long(), shape)


def test_rows_along_curves(flex_gemm):
    spconv, serialize = flex_gemm.ops.spconv, flex_gemm.ops.serialize
    feats, coords, shape = voxels(80, 2)
    weight = torch.randn(3, 3, 3, 3, 2).double()
    want = None
    for mode, name in ((0, None), (1, "z_order"), (2, "hilbert")):
        spconv.SERIALIZATION_MODE = mode
        out, places, _ = spconv.sparse_conv3d(feats, coords, shape, weight, stride=(2, 2, 2), padding=(1, 1, 1))
        rows = dict(zip(map(tuple, places.tolist()), out, strict=True))
        want = rows if want is None else want
        assert rows.keys() == want.keys()
        for place, row in rows.items():
            torch.testing.assert_close(row, want[place])
        if name:
            codes = serialize.encode_seq(places, shape, name)
            assert torch.equal(codes, codes.sort().values)


class TestExtension:
    def test_tables(self, flex_gemm):
        cuda, init = flex_gemm.kernels.cuda, flex_gemm.ops.utils.init_hashmap
        _, coords, shape = voxels(50, 1)
        keys, vals = init(shape, 120, "cpu")
        assert keys.dtype == vals.dtype == torch.uint32
        cuda.hashmap_insert_3d_idx_as_val(keys, vals, coords, *shape[2:])
        query = torch.cat([coords[10:20], torch.tensor([[0, 99, 0, 0]])]).int()
        found = cuda.hashmap_lookup_3d(keys, vals, query, *shape[2:]).view(torch.int32)
        assert found.tolist() == [*range(10, 20), -1]
        wide, _ = init((2, 1, 1 << 20, 1 << 20, 1 << 10), 8, "cpu")
        assert wide.dtype == torch.uint64
        with pytest.raises(ValueError, match="64 bits"):
            init((1, 1, 1 << 31, 1 << 31, 1 << 31), 8, "cpu")

    def test_neighbour_maps(self, flex_gemm):
        spconv, cuda = flex_gemm.ops.spconv, flex_gemm.kernels.cuda
        _, coords, shape = voxels(50, 2)
        keys, vals = flex_gemm.ops.utils.init_hashmap(shape, 120, "cpu")
        table = cuda.hashmap_build_submanifold_conv_neighbour_map(keys, vals, coords, *shape[2:], 3, 3, 3, 1, 1, 1)
        cache = spconv.SubMConv3dFunction._compute_neighbor_cache(coords, shape, (3, 3, 3), (1, 1, 1))
        assert torch.equal(table.view(torch.int32), cache.neighbor_map.view(torch.int32))
        masks, order, *_ = cuda.neighbor_map_post_process_for_masked_implicit_gemm_1(table)
        live, starts = cuda.neighbor_map_post_process_for_masked_implicit_gemm_2(masks, order, 16)
        assert torch.equal(live, cache.valid_kernel_callback(16))
        assert torch.equal(starts, cache.valid_kernel_seg_callback(16))

    def test_sampling_maps(self, flex_gemm):
        cuda = flex_gemm.kernels.cuda
        feats, coords, shape = voxels(60, 3)
        grid = torch.rand(2, 9, 3) * 6
        keys, vals = flex_gemm.ops.utils.init_hashmap(shape, 150, "cpu")
        rows, weight = cuda.hashmap_build_grid_sample_3d_trilinear_neighbor_map_weight(
            keys, vals, coords, grid, *shape[2:]
        )
        out = flex_gemm.kernels.triton.indice_weighed_sum_fwd(feats, rows.view(-1, 8), weight.view(-1, 8))
        want = flex_gemm.ops.grid_sample.grid_sample_3d(feats, coords, shape, grid)
        torch.testing.assert_close(out.view(2, 9, 3), want)


def test_autotune_cache_files(flex_gemm, tmp_path):
    utils = flex_gemm.utils
    utils.load_autotune_cache({"*": {"kernel": {}}})
    utils.save_autotune_cache(tmp_path / "cache.json")
    utils.get_autotune_cache().clear()
    utils.load_autotune_cache(tmp_path / "nothing.json")
    assert utils.get_autotune_cache() == {}
    utils.load_autotune_cache(str(tmp_path / "cache.json"))
    assert utils.get_autotune_cache() == {"*": {"kernel": {}}}
    utils.get_autotune_cache().clear()
    with pytest.raises(TypeError):
        utils.load_autotune_cache(3)
