"""HashTable against a dictionary."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_bridge.adapters.spconv.upstream.voxel_hash import HashTable
from sparse_bridge.errors import SparseBridgeError

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
    ),
]


def table(device="cpu", keys=torch.int64, values=torch.int64, room=64):
    return HashTable(torch.device(device), keys, values, room if device == "cuda" else -1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("keys", [torch.int32, torch.int64])
@pytest.mark.parametrize("values", [torch.int32, torch.int64, torch.float32, torch.float64])
def test_insert_query_items(device, keys, values):
    made = table(device, keys, values)
    some = torch.tensor([5, -3, 5, torch.iinfo(keys).max, torch.iinfo(keys).min], dtype=keys)
    numbers = torch.arange(10, 15, dtype=values)
    made.insert(some.to(device), numbers.to(device))
    made.insert(some[:2].to(device), numbers[3:].to(device))  # present keys keep their value
    found, empty = made.query(torch.tensor([-3, 4, 5], dtype=keys, device=device))
    assert found[[0, 2]].tolist() == [11, 10] and empty.tolist() == [False, True, False]
    assert found.dtype == values and empty.dtype == torch.bool
    stored, kept, count = made.items()
    assert count.shape == (1,) and int(count) == 4
    assert stored.shape[0] == kept.shape[0] == (64 if device == "cuda" else 4)
    assert stored[:count].tolist() == [5, -3, *some[3:].tolist()]
    assert kept[:count].tolist() == [10, 11, 13, 14]


@settings(max_examples=60)
@given(
    calls=st.lists(
        st.tuples(st.booleans(), st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 99)), max_size=12)), max_size=6
    )
)
def test_behaves_like_a_dictionary(calls):
    made, model = table(), {}
    for overwrite, pairs in calls:
        keys = torch.tensor([key for key, _ in pairs], dtype=torch.int64)
        values = torch.tensor([value for _, value in pairs], dtype=torch.int64)
        first = dict(reversed(pairs))
        if overwrite:
            absent = made.insert_exist_keys(keys, values)
            assert absent.dtype == torch.uint8
            assert absent.tolist() == [int(key not in model) for key, _ in pairs]
            model.update({key: value for key, value in first.items() if key in model})
        else:
            made.insert(keys, values)
            for key, _ in pairs:
                model.setdefault(key, first[key])
        stored, kept, count = made.items()
        assert list(zip(stored.tolist(), kept.tolist(), strict=True)) == list(model.items())
        assert int(count) == len(made) == len(model)
    asked = torch.arange(-10, 11)
    found, empty = made.query(asked)
    assert empty.tolist() == [key not in model for key in asked.tolist()]
    assert found.tolist() == [model.get(key, 0) for key in asked.tolist()]


@pytest.mark.parametrize("device", DEVICES)
def test_arange_and_buffers(device):
    made = table(device, torch.int32, torch.int32)
    made.insert(torch.tensor([9, 9, 2], dtype=torch.int32, device=device))
    assert made.query(torch.tensor([2], dtype=torch.int32, device=device))[0].tolist() == [0]
    assert made.assign_arange_().tolist() == [2]
    buffer = torch.full((3,), 7, dtype=torch.int32, device=device)
    keys = torch.tensor([2, 9, 1], dtype=torch.int32, device=device)
    found, empty = made.query(keys, buffer)
    assert found is buffer and found.tolist() == [1, 0, 0] and empty.tolist() == [False, False, True]
    assert made.items(max_size=5)[0].tolist() == [9, 2, 0, 0, 0]
    with pytest.raises(OverflowError):
        made.items(max_size=1)


def test_an_empty_table():
    made = table()
    found, empty = made.query(torch.tensor([1, 2]))
    assert found.tolist() == [0, 0] and empty.tolist() == [True, True]
    assert [part.tolist() for part in made.items()] == [[], [], [0]]
    assert made.insert_exist_keys(torch.tensor([1]), torch.tensor([1])).tolist() == [1]
    made.insert(torch.empty(0, dtype=torch.int64))
    assert len(made) == 0


def test_capacity():
    made = table()
    made._capacity = 3  # as on a GPU
    made.insert(torch.tensor([1, 2, 2]))
    with pytest.raises(RuntimeError, match="max_size=3") as caught:
        made.insert(torch.tensor([1, 5, 6]))
    assert isinstance(caught.value, OverflowError) and len(made) == 2
    made.insert(torch.tensor([1, 2, 7]))
    assert len(made) == 3 and made.items()[0].tolist() == [1, 2, 7]


def test_bad_arguments():
    cpu = torch.device("cpu")
    for keys, values in ((torch.float32, torch.int32), (torch.int64, torch.float16)):
        with pytest.raises(KeyError, match="cannot be"):
            HashTable(cpu, keys, values)
    with pytest.raises(AssertionError):
        HashTable(torch.device("cuda"), torch.int64, torch.int64)
    with pytest.raises(AttributeError):
        HashTable("cpu", torch.int64, torch.int64)
    made = table()
    for call in (
        lambda: made.insert(torch.tensor([1], dtype=torch.int32)),
        lambda: made.insert(torch.tensor([1]), torch.tensor([1, 2])),
        lambda: made.insert(torch.tensor([1]), torch.tensor([1.0])),
        lambda: made.query(torch.tensor([[1]])),
        lambda: made.query(torch.zeros(1, dtype=torch.int64, device="meta")),
    ):
        with pytest.raises(RuntimeError) as caught:
            call()
        assert isinstance(caught.value, SparseBridgeError)
    with pytest.raises(NotImplementedError):
        table(values=torch.float32).assign_arange_()
