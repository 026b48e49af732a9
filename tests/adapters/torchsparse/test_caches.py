"""What tensors of one network share, and what a transposed layer finds there."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch

from sparse_bridge.adapters import protocol
from sparse_bridge.core.geometry.data_bounds import DataBounds
from sparse_bridge.errors import SparseBridgeError

from . import oracle
from .test_conv import points

ONE, TWO = (1, 1, 1), (2, 2, 2)


def tensor(ts, channels=4, seed=0, **kwargs):
    coords = points(ts.release, seed=seed)
    return ts.SparseTensor(torch.randn(len(coords), channels), coords, **kwargs)


def test_layers_register_their_sites_once(ts):
    nn, x = ts.nn, tensor(ts)
    assert x.cmaps == {} and x.kmaps == {}
    y = nn.Conv3d(4, 4, 1)(x)
    assert y.cmaps is x.cmaps and list(x.cmaps) == [ONE] and x.kmaps == {}
    site = x.cmaps[ONE][0] if ts.release == "2.1" else x.cmaps[ONE]
    assert site is x.coords
    z = nn.Conv3d(4, 4, 2, stride=2)(y)
    assert list(x.cmaps) == [ONE, TWO] and list(x.kmaps) == [(ONE, TWO, TWO, ONE)]
    coarse = x.cmaps[TWO]
    other = nn.Conv3d(4, 4, 3, stride=2)(y)
    assert x.cmaps[TWO] is coarse and z._caches is other._caches is x._caches
    with_dilation = nn.Conv3d(4, 4, 3, dilation=2)(x)
    assert (ONE, (3, 3, 3), ONE, (2, 2, 2)) in x.kmaps
    assert torch.equal(with_dilation.F, nn.functional.conv3d(x, x.F.new_zeros(27, 4, 4), 3).F) is False


def test_layers_of_one_geometry_share_a_map(ts):
    nn, x = ts.nn, tensor(ts)
    first = nn.Conv3d(4, 4, 3)(x)
    kept = dict(x.kmaps)
    second = nn.Conv3d(4, 8, 3)(first)
    assert dict(x.kmaps) == kept and second.C is x.C
    down = nn.Conv3d(4, 4, 2, stride=2)
    assert down(x).C is down(x).C


def test_old_names_of_the_caches(ts):
    x = tensor(ts)
    assert x.coord_maps is x.cmaps is x._caches.cmaps
    assert x.kernel_maps is x.kmaps is x._caches.kmaps
    y = tensor(ts, seed=1)
    y.cmaps, y.kmaps = x.cmaps, x.kmaps
    assert y._caches is not x._caches and y._caches.cmaps is x._caches.cmaps
    y.coord_maps = {}
    assert y.cmaps == {} and x.cmaps is not y.cmaps
    y._caches = x._caches
    y._caches.idx_query = "anything"
    assert x._caches.idx_query == "anything"
    assert x._caches.hashmaps == {}


def test_other_sites_at_the_same_stride_get_a_map_of_their_own(ts):
    """Two strided layers make different sites; a cached map is used only for those it belongs
    to."""
    nn, x = ts.nn, tensor(ts)
    options = {"padding": 1} if ts.release == "2.1" else {}
    pair = [nn.Conv3d(4, 4, 2, stride=2)(x), nn.Conv3d(4, 4, 3, stride=2, **options)(x)]
    assert len(pair[0].C) != len(pair[1].C) or not torch.equal(pair[0].C, pair[1].C)
    conv = nn.Conv3d(4, 5, 3)
    for one in (*pair, *pair):
        got = conv(one)
        sites = oracle.to_sites(one.C, ts.release)
        _, triples = oracle.layer(sites, (3, 3, 3), ONE, ONE, one.stride, ts.release)
        want = oracle.product(one.F, conv.kernel, None, triples, len(sites))
        torch.testing.assert_close(got.F.double(), want, atol=1e-5, rtol=1e-4)


def test_coordinates_changed_in_place(ts):
    conv, x = ts.nn.Conv3d(4, 4, 3), tensor(ts)
    conv(x)
    x.C[: len(x.C) // 2] += 40
    sites = oracle.to_sites(x.C, ts.release)
    _, triples = oracle.layer(sites, (3, 3, 3), ONE, ONE, ONE, ts.release)
    want = oracle.product(x.F, conv.kernel, None, triples, len(sites))
    torch.testing.assert_close(conv(x).F.double(), want, atol=1e-5, rtol=1e-4)


def test_equal_coordinates_in_another_tensor_use_the_cached_map(ts):
    conv, x = ts.nn.Conv3d(4, 4, 3), tensor(ts)
    y = conv(x)
    clone = ts.SparseTensor(x.F, x.C.clone())
    clone._caches = x._caches
    entries = list(x.kmaps.values())
    assert torch.equal(conv(clone).F, y.F) and list(x.kmaps.values()) == entries
    assert all(a is b for a, b in zip(x.kmaps.values(), entries, strict=True))


def test_transposed_without_an_earlier_layer(ts):
    nn, x = ts.nn, tensor(ts, stride=2)
    for layer in (nn.Conv3d(4, 4, 2, stride=2, transposed=True), nn.Conv3d(4, 4, 3, transposed=True)):
        with pytest.raises(SparseBridgeError, match=r"needs the map of an earlier layer"):
            layer(x)
        with pytest.raises(KeyError):
            layer(x)
        with pytest.raises(TypeError):
            layer(x)


def test_transposed_needs_the_same_kernel(ts):
    nn, x = ts.nn, tensor(ts)
    y = nn.Conv3d(4, 4, 2, stride=2)(x)
    with pytest.raises(KeyError, match=r"kernel \(3, 3, 3\).*there are such maps at \[\]"):
        nn.Conv3d(4, 4, 3, stride=2, transposed=True)(y)


def test_transposed_refuses_other_rows(ts):
    nn, x = ts.nn, tensor(ts)
    y = nn.Conv3d(4, 4, 2, stride=2)(x)
    up = nn.Conv3d(4, 4, 2, stride=2, transposed=True)
    for rows in (torch.arange(len(y.F) - 1), torch.arange(len(y.F)).flip(0)):
        other = ts.SparseTensor(y.F[rows], y.C[rows], y.stride)
        other._caches = y._caches
        with pytest.raises(SparseBridgeError, match="order included"):
            up(other)


def test_a_raw_input_needs_no_registration(ts):
    """torchsparse raises KeyError here; the map knows its own inputs."""
    nn, x = ts.nn, tensor(ts)
    z = nn.Conv3d(4, 3, 2, stride=2, transposed=True)(nn.Conv3d(4, 4, 2, stride=2)(x))
    assert torch.equal(z.C, x.C) and z.stride == ONE


def test_two_levels_and_back(ts):
    nn, x = ts.nn, tensor(ts)
    down = [nn.Conv3d(4, 4, 2, stride=2) for _ in range(2)]
    up = [nn.Conv3d(4, 4, 2, stride=2, transposed=True) for _ in range(2)]
    a = down[0](x)
    b = down[1](a)
    assert b.stride == (4, 4, 4)
    c = up[1](up[0](b))
    assert torch.equal(c.C, x.C) and c.stride == ONE and c.F.shape == (len(x.C), 4)


def test_user_made_entries_are_read(ts):
    """Entries in the framework's own form, as an unpickled or unbridged tensor has them."""
    nn, x = ts.nn, tensor(ts)
    y = nn.Conv3d(4, 4, 2, stride=2)(x)
    up = nn.Conv3d(4, 4, 2, stride=2, transposed=True)
    want = up(y).F
    x.cmaps.setdefault(x.stride, (x.C, None) if ts.release == "2.1" else x.C)
    plain = pickle.loads(pickle.dumps(x.kmaps))
    (entry,) = plain.values()
    assert type(entry) is (dict if ts.release == "2.1" else list)
    forms = [entry]
    if ts.release == "2.1":
        forms.append({k: v for k, v in entry.items() if k != "out_in_map"})
    for form in forms:
        z = ts.SparseTensor(y.F, y.C, y.stride)
        z.cmaps, z.kmaps = x.cmaps, {next(iter(plain)): form}
        torch.testing.assert_close(up(z).F, want)
    z.kmaps = {next(iter(plain)): form}
    z.cmaps = {ONE: (x.C[1:], None) if ts.release == "2.1" else x.C[1:]}
    with pytest.raises(SparseBridgeError, match="belong to other tensors"):
        up(z)


def test_entries_in_full(ts):
    """nbmaps, nbsizes and out_in_map as the contract lays them out."""
    nn, x = ts.nn, tensor(ts)
    sites = oracle.to_sites(x.C, ts.release)
    for kernel, stride in ((3, 1), (2, 2), (2, 1)):
        shape, step = (kernel,) * 3, (stride,) * 3
        nn.Conv3d(4, 4, kernel, stride=stride)(x)
        entry = x.kmaps[ONE, shape, step, ONE]
        out, triples = oracle.layer(sites, shape, step, (0, 0, 0), ONE, ts.release)
        new = ts.release == "2.1"
        nbmaps, nbsizes = (entry["nbmaps"], entry["nbsizes"]) if new else entry[:2]
        assert (entry["sizes"] if new else entry[2]) == (len(sites), len(out))
        assert nbmaps.dtype == nbsizes.dtype == torch.int32
        v = torch.arange(len(nbsizes)).repeat_interleave(nbsizes.long())
        found = torch.cat([v.unsqueeze(1), nbmaps.long()], 1).tolist()
        assert sorted(map(tuple, found)) == sorted(triples)
        if new:
            table = entry["out_in_map"]
            assert table.dtype == torch.int32 and table.shape == (-(-len(out) // 128) * 128, kernel**3)
            want = torch.full_like(table, -1)
            back = torch.full((-(-len(sites) // 128) * 128, kernel**3), -1, dtype=torch.int32)
            for v, i, j in triples:
                want[j, v], back[i, v] = i, j
            assert torch.equal(table, want) and torch.equal(entry["out_in_map_t"], back)
            assert torch.equal(entry["nbmaps_t"], nbmaps.flip(1)) and entry["nbsizes_t"] is nbsizes
            assert entry["spatial_range"] is None and len(entry["coords"]) == len(out)
            with pytest.raises(KeyError):
                _ = entry["nonesuch"]
        else:
            assert len(entry) == 3 and list(entry)[2] == (len(sites), len(out))


def test_copies_of_a_tensor(ts):
    nn, x = ts.nn, tensor(ts)
    y = nn.Conv3d(4, 4, 2, stride=2)(x)
    up = nn.Conv3d(4, 4, 2, stride=2, transposed=True)
    clone = copy.deepcopy(ts.SparseTensor(y.F.detach(), y.C, y.stride))
    clone._caches = copy.deepcopy(y._caches)
    assert torch.equal(up(clone).F, up(y).F)
    z = pickle.loads(pickle.dumps(ts.SparseTensor(y.F.detach(), y.C, y.stride)))
    assert torch.equal(z.F, y.F) and z.stride == TWO


def test_maps_live_as_long_as_the_caches(ts):
    nn, x = ts.nn, tensor(ts)
    y = nn.Conv3d(4, 4, 3)(nn.Conv3d(4, 4, 2, stride=2)(x))
    maps = [weakref.ref(entry.record.kmap.rulebook) for entry in x.kmaps.values()]
    assert len(maps) == 2
    coords = x.C
    del x, y
    gc.collect()
    assert [m() for m in maps] == [None, None], "coordinates alone keep nothing alive"
    again = nn.Conv3d(4, 4, 3)(ts.SparseTensor(torch.randn(len(coords), 4), coords))
    kept = weakref.ref(next(iter(again.kmaps.values())).record.kmap.rulebook)
    cache = again._caches
    del again
    gc.collect()
    assert kept() is not None
    cache.kmaps.clear()
    gc.collect()
    assert kept() is None


def test_without_gradients_and_in_inference_mode(ts):
    nn, x = ts.nn, tensor(ts)
    net = torch.nn.Sequential(
        nn.Conv3d(4, 4, 3),
        nn.Conv3d(4, 4, 2, stride=2),
        nn.Conv3d(4, 4, 3),
        nn.Conv3d(4, 4, 2, stride=2, transposed=True),
    ).eval()
    want = net(x).F
    with torch.no_grad():
        assert torch.equal(net(tensor_like(ts, x)).F, want)
    with torch.inference_mode():
        y = net(tensor_like(ts, x, clone=True))
        assert torch.equal(y.F, want)
        assert torch.equal(net(y._replace if False else tensor_like(ts, x, clone=True)).F, want)


def tensor_like(ts, x, clone=False):
    return ts.SparseTensor(x.F.detach(), x.C.clone() if clone else x.C, x.stride)


def test_one_cache_for_all(ts21):
    ts21.release = "2.1"
    from torchsparse.utils import tensor_cache as tc

    assert tc.get_tensor_cache_mode() is tc.TensorCacheMode.SEPARATE_TENSOR_CACHE
    with pytest.raises(AssertionError, match="expected a TensorCacheMode"):
        tc.set_tensor_cache_mode(1)
    tc.set_tensor_cache_mode(tc.TensorCacheMode.GLOBAL_TENSOR_CACHE)
    x, y = tensor(ts21), tensor(ts21, seed=1)
    assert x._caches is y._caches is tc.get_global_tensor_cache()
    conv = ts21.nn.Conv3d(4, 4, 3)
    alone = conv(x).F, conv(y).F
    assert not torch.equal(x.C, y.C)
    tc.clear_global_tensor_cache()
    assert tc.get_global_tensor_cache() is not x._caches
    mine = tc.TensorCache()
    tc.set_global_tensor_cache(mine)
    again = tensor(ts21, seed=1)
    again.F = y.F
    assert again._caches is mine and torch.equal(conv(again).F, alone[1])


def test_the_first_map_of_a_key_serves_all(ts21):
    """Padding is no part of the key, as in torchsparse: the second layer gets the first one's
    sites."""
    ts21.release = "2.1"
    nn, x = ts21.nn, tensor(ts21)
    first = nn.Conv3d(4, 4, 3, stride=2, padding=1)(x)
    second = nn.Conv3d(4, 4, 3, stride=2, padding=0)(x)
    assert second.C is first.C
    fresh = nn.Conv3d(4, 4, 3, stride=2, padding=0)(tensor(ts21))
    assert len(fresh.C) != len(first.C)


def test_ranges_travel(ts21):
    ts21.release = "2.1"
    nn, x = ts21.nn, tensor(ts21, spatial_range=(2, 6, 5, 7))
    same = nn.Conv3d(4, 4, 3)(x)
    assert same.spatial_range == (2, 6, 5, 7)
    even = nn.Conv3d(4, 4, 2)(x)
    assert even.spatial_range == (2, 5, 4, 6) and even.C is x.C
    after = nn.Conv3d(4, 4, 3)(even)
    assert after.spatial_range == (2, 6, 5, 7), "the map of this key came first with the old range"
    coarse = nn.Conv3d(4, 4, 2, stride=2)(even)
    assert coarse.spatial_range == (2, 2, 2, 3)
    assert coarse.C[:, 1:].amax(0).tolist() <= [1, 1, 2]
    long = tensor(ts21, spatial_range=(2, 6, 5, 7, 16))
    assert nn.Conv3d(4, 4, 1)(long).spatial_range == (2, 6, 5, 7, 16)
    assert nn.Conv3d(4, 4, 3)(long).spatial_range == (2, 6, 5, 7)
    assert ts21.cat([same, even]).spatial_range is None
    assert (same + even).spatial_range == (2, 6, 5, 7)


def test_ranges_that_the_rows_leave(ts21):
    ts21.release = "2.1"
    nn = ts21.nn
    conv = nn.Conv3d(4, 4, 3, stride=2, padding=1)
    with pytest.raises(ValueError, match=r"axis y is 4; 0 <= c < 4 is allowed.*\(2, 6, 4, 7\)"):
        conv(tensor(ts21, spatial_range=(2, 6, 4, 7)))
    x = tensor(ts21, spatial_range=(2, 6, 4, 7))
    nn.Conv3d(4, 4, 3)(x)  # without a stride the range limits nothing
    with pytest.raises(ValueError, match="axis y"):
        conv(x)
    low = points("2.1", low=(0, -1, 0))
    with pytest.raises(ValueError, match=r"axis y is -1"):
        conv(ts21.SparseTensor(torch.randn(len(low), 4), low, spatial_range=(2, 9, 9, 9)))
    with pytest.raises(ValueError, match=r"expected \(batch, x, y, z\)"):
        conv(tensor(ts21, spatial_range=(9, 9, 9)))
    few = tensor(ts21, spatial_range=(1, 6, 5, 7))  # the batch entry bounds nothing
    assert conv(few).C[:, 0].max() == 1


@pytest.mark.parametrize("size", [2, 3])
def test_replays_start_from_where_the_data_ends(ts, size):
    """As strided layers do, whatever is known of the coordinates: a range elsewhere, or a box of what may be there."""
    nn = ts.nn
    for seed in range(6):
        rows = torch.randint(-5, 39, (30, 4), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
        rows[:, 0 if ts.release == "2.1" else 3] = 0
        values, known = torch.randn(30, 4), {}
        if ts.release == "2.1" and seed % 2:
            rows, known = rows.abs(), {"spatial_range": (1, 41, 42, 43)}
        nn.Conv3d(4, 4, size, stride=2)(ts.SparseTensor(values, rows, **known))
        x = ts.SparseTensor(values, rows)
        for _ in range(3):
            root = protocol.of(x).capture_root(x)
            exact = DataBounds(root.coords).box
            assert root.box is exact and root.for_steps(True) is root
            near = root.for_steps(False)  # for layers that make no level
            assert near.box is (root.limit or exact) and near.for_steps(False) is near
            assert near.for_steps(True) == root and (root.limit is None or near.bounds_known)
            x = nn.Conv3d(4, 4, size, stride=2)(x)
            x = ts.SparseTensor(x.F, x.C, x.stride)
