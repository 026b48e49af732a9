"""The union sum against a dictionary of rows, the wheel, and gradcheck."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_bridge.core.ops.union import union_rows
from sparse_bridge.errors import ShapeError

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
    ),
]


def operand(seed, rows, shape, batch, channels, dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.randint(0, n, (rows,), generator=generator) for n in (batch, *shape)]
    features = torch.randn(rows, channels, generator=generator, dtype=torch.float64)
    return torch.stack(columns, 1).int().to(device), features.to(dtype).to(device)


def by_dictionary(indices_list, features_list):
    sums: dict[tuple[int, ...], torch.Tensor] = {}
    for indices, features in zip(indices_list, features_list, strict=True):
        for key, row in zip(indices.tolist(), features.double(), strict=True):
            sums[tuple(key)] = sums.get(tuple(key), 0) + row
    keys = sorted(sums)
    return torch.tensor(keys, dtype=torch.int32), torch.stack([sums[key] for key in keys])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(40,), (6, 5), (4, 3, 5), (3, 2, 3, 2)])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matches_a_dictionary(device, shape, count):
    parts = [operand(s, 30 + s, shape, 2, 3, device=device) for s in range(count)]
    indices, features = union_rows([p[0] for p in parts], [p[1] for p in parts], shape, 2)
    keys, sums = by_dictionary([p[0].cpu() for p in parts], [p[1].cpu() for p in parts])
    assert indices.dtype == torch.int32 and indices.is_contiguous()
    assert indices.cpu().tolist() == keys.tolist()
    torch.testing.assert_close(features.cpu(), sums)


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=3),
    shape=st.lists(st.sampled_from([1, 2, 7, 2**31 - 1]), min_size=1, max_size=4),
    seed=st.integers(0, 999),
)
def test_extents_of_any_size(sizes, shape, seed):
    # Four axes of 2^31 do not fit one 64-bit key; rows outside the shape stay apart from others.
    parts = [operand(seed + k, rows, shape, 3, 2) for k, rows in enumerate(sizes)]
    parts[0][0][:5, 1:] *= -1
    indices, features = union_rows([p[0] for p in parts], [p[1] for p in parts], shape, 3)
    if not sum(sizes):
        assert indices.shape == (0, len(shape) + 1) and features.shape == (0, 2)
        return
    keys, sums = by_dictionary([p[0] for p in parts], [p[1] for p in parts])
    assert indices.tolist() == keys.tolist()
    torch.testing.assert_close(features, sums)


def test_matches_the_wheel():
    pytorch = pytest.importorskip("spconv.pytorch")
    if "sparse_bridge" in (getattr(pytorch, "__file__", "") or ""):
        pytest.skip("a stand-in answers the import")
    parts = [operand(s, 200, (9, 8, 7), 2, 5, torch.float32) for s in range(2)]
    tensors = [pytorch.SparseConvTensor(f, i, [9, 8, 7], 2) for i, f in parts]
    expected = pytorch.functional.sparse_add(*tensors)
    indices, features = union_rows([p[0] for p in parts], [p[1] for p in parts], [9, 8, 7], 2)
    assert torch.equal(indices, expected.indices)
    torch.testing.assert_close(features, expected.features)


@pytest.mark.parametrize("rows", [12, 60])
def test_gradcheck(rows):
    parts = [operand(s, rows, (3, 2), 1, 2) for s in range(2)]
    indices = [p[0] for p in parts]
    leaves = [p[1].requires_grad_() for p in parts]
    assert torch.autograd.gradcheck(lambda *f: union_rows(indices, f, (3, 2), 1)[1], leaves)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("extent", [2, 50])
def test_half_types_accumulate_in_float32(device, dtype, extent):
    # extent 2: many rows per coordinate, where a sum in the type itself would lose its last rows.
    indices, _ = operand(1, 3000, (extent,), 1, 4, device=device)
    features = torch.rand(3000, 4, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    got = union_rows([indices], [features], (extent,), 1)[1]
    _, expected = by_dictionary([indices.cpu()], [features.cpu()])
    assert got.dtype == dtype
    torch.testing.assert_close(got.double().cpu(), expected, rtol=torch.finfo(dtype).eps + 2e-6, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_repeats_bit_for_bit(device):
    parts = [operand(s, 4000, (9, 8), 2, 16, torch.float32, device) for s in range(3)]
    grad = None
    for _ in range(3):
        leaves = [p[1].clone().requires_grad_() for p in parts]
        features = union_rows([p[0] for p in parts], leaves, (9, 8), 2)[1]
        (features * features).sum().backward()
        found = torch.cat([features.detach(), *(leaf.grad for leaf in leaves)])
        assert grad is None or torch.equal(found, grad)
        grad = found


def test_dtypes_are_promoted():
    first, second = operand(0, 5, (3,), 1, 2), operand(1, 5, (3,), 1, 2, torch.float32)
    assert union_rows([first[0], second[0]], [first[1], second[1]], (3,), 1)[1].dtype == torch.float64


def test_bad_operands():
    indices, features = operand(0, 5, (3,), 1, 2)
    for call in (
        lambda: union_rows([], [], (3,), 1),
        lambda: union_rows([indices], [features, features], (3,), 1),
        lambda: union_rows([indices] * 2, [features, features[:, :1]], (3,), 1),
        lambda: union_rows([indices], [features], (3, 3), 1),
    ):
        with pytest.raises(AssertionError):
            call()
    with pytest.raises(ShapeError):
        union_rows([indices[:4]], [features], (3,), 1)
    with pytest.raises(RuntimeError):
        union_rows([indices, indices.to("meta")], [features, features.to("meta")], (3,), 1)
