"""Functions that a case calls as `fn.<name>`. None of them assumes a row order of the library."""

from __future__ import annotations

import copy

import numpy as np
import torch

from tests.goldens.compare import Mismatch, numpy_of


def size(*dims):
    return torch.Size(dims)


def int_tensor(values):
    return torch.tensor(values, dtype=torch.int32)


def hash_mask(x, modulus, keep_below, salt=0):
    """Boolean mask computed from integer coordinates only."""
    c = numpy_of(x.C).astype(np.int64)
    h = np.full(len(c), 17 + salt, dtype=np.int64)
    for j in range(c.shape[1]):
        h = (h * 31 + c[:, j] * (2 * j + 3)) % 1000003
    return torch.from_numpy((h % modulus) < keep_below).to(x.F.device)


def mask_in(x, coords):
    known = {tuple(row) for row in numpy_of(coords).tolist()}
    hit = [tuple(r) in known for r in numpy_of(x.C).tolist()]
    return torch.tensor(hit, dtype=torch.bool, device=x.F.device)


def full_mask(x, value):
    return torch.full((len(x.F),), bool(value), dtype=torch.bool, device=x.F.device)


def topk_mask(x, k):
    """Keep the k highest scores of every batch item (column 0 of F)."""
    score = x.F.detach()[:, 0]
    batch = x.C[:, 0]
    mask = torch.zeros(len(score), dtype=torch.bool, device=score.device)
    for b in batch.unique().tolist():
        rows = (batch == b).nonzero().flatten()
        best = score[rows].topk(min(k, len(rows))).indices
        mask[rows[best]] = True
    return mask


def kernel_map_rows(cm, in_key, out_key, kmap):
    """[n, 1 + 2 (D+1)] rows (offset index, input coordinate, output coordinate)."""
    ci, co = numpy_of(cm.get_coordinates(in_key)), numpy_of(cm.get_coordinates(out_key))
    rows = []
    for k in sorted(kmap):
        pair = numpy_of(kmap[k]).astype(np.int64)
        if pair.ndim != 2 or pair.shape[0] != 2:
            raise Mismatch(f"kernel map entry {k} has shape {pair.shape}, expected [2, n]")
        if pair.shape[1] == 0:
            raise Mismatch(f"kernel map lists offset {k} although it is empty")
        rows.append(np.concatenate([np.full((pair.shape[1], 1), k), ci[pair[0]], co[pair[1]]], axis=1))
    width = 1 + ci.shape[1] + co.shape[1]
    return np.concatenate(rows) if rows else np.zeros((0, width), np.int64)


def stride_map_rows(cm, in_key, out_key):
    i, o = cm.stride_map(in_key, out_key)
    ci, co = numpy_of(cm.get_coordinates(in_key)), numpy_of(cm.get_coordinates(out_key))
    return np.concatenate([ci[numpy_of(i).astype(np.int64)], co[numpy_of(o).astype(np.int64)]], axis=1)


def origin_map_rows(cm, key):
    """[n, 2 + D + 1] rows (batch index by list slot, origin batch present, coordinate)."""
    batches, rows = cm.origin_map(key)
    c = numpy_of(cm.get_coordinates(key))
    present = set(numpy_of(batches).tolist())
    out = []
    for b, r in enumerate(rows):
        r = numpy_of(r).astype(np.int64)
        out.append(np.concatenate([np.full((len(r), 1), b), np.full((len(r), 1), int(b in present)), c[r]], axis=1))
    return np.concatenate(out)


def interp_entries(cm, key, q):
    i, s, w = cm.interpolation_map_weight(key, q)
    c = numpy_of(cm.get_coordinates(key))[numpy_of(i).astype(np.int64)]
    return {"C": np.concatenate([numpy_of(s).reshape(-1, 1), c], axis=1), "F": numpy_of(w).reshape(-1, 1)}


def permutations_ok(x):
    """decomposition_permutations partitions the rows by batch index."""
    c = numpy_of(x.C).astype(np.int64)
    perms = [numpy_of(p).astype(np.int64) for p in x.decomposition_permutations]
    pure = all((c[p, 0] == b).all() for b, p in enumerate(perms))
    cover = sorted(np.concatenate(perms).tolist()) == list(range(len(c)))
    return bool(pure and cover and len(perms) == c[:, 0].max() + 1)


def permuted_ok(x):
    """decomposed_* follow the permutations row by row."""
    ok = True
    cs, fs = x.decomposed_coordinates, x.decomposed_features
    for b, p in enumerate(x.decomposition_permutations):
        ok &= bool((x.C[p][:, 1:] == cs[b]).all()) and bool((x.F[p] == fs[b]).all())
        ok &= bool((x.features_at(b) == fs[b]).all())
    return bool(ok)


def inverse_ok(x, coords):
    """coordinates == C[inverse_mapping] and C == coordinates[unique_index]."""
    c = numpy_of(coords)
    a = (numpy_of(x.C)[numpy_of(x.inverse_mapping).astype(np.int64)] == c).all()
    b = (c[numpy_of(x.unique_index).astype(np.int64)] == numpy_of(x.C)).all()
    return bool(a and b)


def field_inverse_ok(field, x, coords, stride=1):
    """Every point of the field maps to the voxel that contains it."""
    inv = numpy_of(field.inverse_mapping(x.coordinate_map_key)).astype(np.int64)
    c = numpy_of(coords).astype(np.float64)
    want = np.concatenate([c[:, :1], np.floor(c[:, 1:] / stride) * stride], axis=1)
    return bool((numpy_of(x.C)[inv] == want).all())


def by_batch(coords, feats):
    """Lists (one entry per batch index) -> {"C", "F"} with the batch index put back."""
    c = [np.concatenate([np.full((len(v), 1), b), numpy_of(v)], axis=1) for b, v in enumerate(coords)]
    f = torch.cat(list(feats))
    return {"C": np.concatenate(c), "F": f}


def pair_cf(coords, feats):
    return {"C": coords, "F": feats}


def lengths(items):
    return [len(v) for v in items]


def equal(a, b):
    return bool(a == b)


def same_object(a, b):
    return a is b


def same_rows(a, b):
    return bool(a.shape == b.shape and (a == b).all())


def type_name(x):
    return type(x).__name__


def key_tuple(key):
    ts, name = key.get_key()
    return [list(map(int, ts)), str(name)]


def key_prefix(key, n):
    ts, name = key.get_key()
    return [list(map(int, ts)), str(name)[:n]]


def shape(x):
    return [int(v) for v in x.shape]


def dtype(x):
    return str(x.dtype).replace("torch.", "")


def int_list(x):
    return [int(v) for v in numpy_of(x).reshape(-1)] if not isinstance(x, (list, tuple)) else [int(v) for v in x]


def item(x, i):
    return x[i]


def to_dense(x):
    return x.to_dense()


def param_shapes(module):
    return {k: [int(d) for d in v.shape] for k, v in module.state_dict().items()}


def sum_all(*tensors):
    total = tensors[0]
    for t in tensors[1:]:
        total = total + t
    return total


def deepcopy(x):
    return copy.deepcopy(x)


def is_arange(x):
    return bool((numpy_of(x) == np.arange(len(x))).all())


def union_map_rows(cm, keys, out_key):
    """[n, 1 + 2 (D+1)] rows (input number, input coordinate, union coordinate)."""
    maps, out = cm.union_map(keys, out_key), numpy_of(cm.get_coordinates(out_key))
    rows = []
    for i, (key, m) in enumerate(zip(keys, maps, strict=True)):
        c, m = numpy_of(cm.get_coordinates(key)), numpy_of(m).astype(np.int64)
        rows.append(np.concatenate([np.full((m.shape[1], 1), i), c[m[0]], out[m[1]]], axis=1))
    return np.concatenate(rows)


def apply(function, *args):
    return function.apply(*args)


def attribute(x, name):
    return getattr(x, name)


def set_features(ME, x, feats):
    return ME.SparseTensor(feats, coordinate_map_key=x.coordinate_map_key, coordinate_manager=x.coordinate_manager)
