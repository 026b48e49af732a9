"""MinkowskiEngine 0.4: what its calls return where 0.5 returns something else, or has no such
call."""

from __future__ import annotations

import copy
import importlib
import pickle
import warnings

import numpy as np
import pytest
import torch

from tests import checks

from .scenes import scene
from .test_old_release import tensor

GAPS = torch.tensor([[0, 0], [0, 1], [2, 0], [2, 1]]).int()  # no batch item 1


# batch items


def test_decomposed_lists_name_the_items_that_exist(ME4):
    x = ME4.SparseTensor(torch.arange(4.0)[:, None], coords=GAPS)
    assert [c.tolist() for c in x.decomposed_coordinates] == [[[0], [1]], [[0], [1]]]
    assert [f.flatten().tolist() for f in x.decomposed_features] == [[0, 1], [2, 3]]
    coords, feats = x.decomposed_coordinates_and_features
    assert len(coords) == len(feats) == len(x.decomposition_permutations) == 2
    assert [r.tolist() for r in x.coords_man.get_row_indices_per_batch(x.coords_key)] == [[0, 1], [2, 3]]
    # One that lost its rows is still an item of the manager.
    kept = ME4.MinkowskiPruning()(x, torch.tensor([True, True, False, False]))
    assert [len(f) for f in kept.decomposed_features] == [2, 0]


def test_items_at_an_index(ME4):
    x = ME4.SparseTensor(torch.arange(4.0)[:, None], coords=GAPS)
    man, key = x.coords_man, x.coords_key
    for index, rows in ((0, [0, 1]), (1, []), (2, [2, 3]), (-1, [2, 3]), (-2, [0, 1])):
        assert x.features_at(index).flatten().tolist() == rows
        assert man.get_row_indices_at(key, index).tolist() == rows
        coords, feats = x.coordinates_and_features_at(torch.tensor(index))
        assert len(coords) == len(feats) == len(x.coordinates_at(np.int64(index))) == len(rows)
    for index in (3, -3, 99):
        for call in (x.features_at, x.coordinates_at, x.coordinates_and_features_at):
            with pytest.raises(IndexError, match=r"0 \.\. 2"):
                call(index)
        with pytest.raises(IndexError, match=str(index)):
            man.get_row_indices_at(key, index)


# quantisation and collation


POINTS = np.array([[0, 0, 0], [0, 0, 1], [0, 0, 4]], np.float64)
LABELS = np.array([7, 8, 9], np.int32)


def test_labels_come_with_the_index(ME4):
    quantize = ME4.utils.sparse_quantize
    asked = {"ignore_label": 255, "return_index": True, "quantization_size": 2}
    for feats in (None, np.ones((3, 1))):
        found = quantize(POINTS, feats, LABELS, **asked)
        assert [part.tolist() for part in found] == [[0, 2], [255, 9]]
        assert all(isinstance(part, np.ndarray) for part in found)
    found = quantize(torch.tensor(POINTS), labels=torch.tensor(LABELS), **asked)
    assert [part.tolist() for part in found] == [[0, 2], [255, 9]]
    assert all(isinstance(part, torch.Tensor) for part in found)
    found = quantize(POINTS, labels=LABELS, return_inverse=True, **asked)
    assert [part.tolist() for part in found] == [[0, 2], [255, 9]]
    del asked["return_index"]
    coords, labels = quantize(POINTS, labels=LABELS, **asked)
    assert coords.tolist() == [[0, 0, 0], [0, 0, 2]] and labels.tolist() == [255, 9]


def test_backend_functions(ME4):
    backend = importlib.import_module("MinkowskiEngineBackend")
    coords = np.array([[0, 0], [0, 0], [1, 2]], np.int32)
    labels = np.array([2, 2, 1], np.int32)
    for found in (
        backend.quantize_label_np(coords, labels, 255),
        backend.quantize_label_th(torch.from_numpy(coords), torch.from_numpy(labels), 255),
        importlib.import_module("MinkowskiEngine.utils.quantization").quantize_label(coords, labels, 255),
    ):
        index, voted = found
        assert index.tolist() == [0, 2] and voted.tolist() == [2, 1]
    feats = torch.tensor([[1.0, 2.0], [3.0, 6.0], [5.0, 5.0]], dtype=torch.float64)
    feats.requires_grad_()
    rows, inverse = torch.arange(3).int(), torch.tensor([0, 0, 2]).int()
    average = backend.quantization_average_features
    assert average(feats, rows, inverse, 3, 0).tolist() == [[2, 4], [0, 0], [5, 5]]
    assert torch.autograd.gradcheck(lambda f: average(f, rows, inverse, 3, 0), (feats,))
    with pytest.raises(RuntimeError, match="leave the matrix"):
        average(feats, rows, inverse, 2, 0)


def test_collations_truncate(ME4):
    utils = ME4.utils
    coords = np.array([[-0.5, 1.5], [-1.5, 2.0]])
    feats, labels = np.ones((2, 1)), np.zeros(2, np.int32)
    want = [[0, 0, 1], [0, -1, 2]]
    assert utils.sparse_collate([coords], [feats])[0].tolist() == want
    assert utils.sparse_collate([torch.tensor(coords)], [feats], [labels])[0].tolist() == want
    assert utils.batch_sparse_collate([(coords, feats, labels)])[0].tolist() == want
    assert utils.SparseCollation()([(coords, feats, labels)])[0].tolist() == want
    assert utils.batched_coordinates([coords])[0].tolist() == [0, -1, 1]
    kept = utils.sparse_collate([coords], [feats], dtype=torch.float32)[0]
    assert kept[0].tolist() == [0, -0.5, 1.5]


# managers and keys


def test_initialize_returns_two_maps(ME4):
    ME = ME4
    cm, key = ME.CoordsManager(D=1), ME.CoordsKey(D=1)
    key.setTensorStride(1)
    coords = torch.IntTensor([[0, 1], [0, 2], [0, 2], [1, 0]])
    mapping, inverse = cm.initialize(coords, key, force_remap=True, allow_duplicate_coords=False)
    assert mapping.tolist() == [0, 1, 3] and inverse.numel() == 0 and key.isKeySet()
    mapping, inverse = cm.initialize(coords, key, True, True, True, True)
    assert torch.equal(coords[mapping][inverse], coords)
    made, (mapping, inverse) = cm.create_coords_key(coords, return_inverse=True)
    assert made.isKeySet() and torch.equal(coords[mapping][inverse], coords)


def test_the_shared_manager_serves_keys(ME4):
    ME = ME4
    with pytest.raises(AssertionError, match="give both"):
        ME.SparseTensor(torch.ones(1, 1), coords_key=tensor(ME).coords_key)
    ME.set_sparse_tensor_operation_mode(ME.SparseTensorOperationMode.SHARE_COORDS_MANAGER)
    a = ME.SparseTensor(torch.ones(4, 1), GAPS, force_creation=True)
    b = ME.SparseTensor(torch.full((4, 1), 3.0), coords_key=a.coords_key)
    c = ME.SparseTensor(torch.ones(4, 1), None, a.coords_key)
    b -= c
    assert b.F.tolist() == [[2.0]] * 4 and b.coords_man is a.coords_man
    ME.clear_global_coords_man()
    with pytest.raises(AssertionError, match="give both"):
        ME.SparseTensor(torch.ones(4, 1), coords_key=a.coords_key)


def test_an_unset_key_is_filled_in(ME4):
    ME = ME4
    key = ME.CoordsKey(1)
    key.setTensorStride(2)
    x = ME.SparseTensor(torch.ones(4, 1), 2 * GAPS, key, ME.CoordsManager(D=1))
    assert key.isKeySet() and x.coords_key == key and x.tensor_stride == [2]
    with pytest.raises(AssertionError, match="not both"):
        ME.SparseTensor(torch.ones(4, 1), GAPS, key)


def test_coarser_maps_that_are_forced(ME4):
    x = tensor(ME4)
    known = x.coords_man.stride(x.coords_key, 2)
    assert x.coords_man.stride(x.coords_key, 2) == known
    for factor in (1, 2):
        made = x.coords_man.stride(x.coords_key, factor, force_creation=True)
        coords = x.coords_man.get_coords(made)
        assert made not in (known, x.coords_key) and made.getTensorStride() == [factor] * 2
        assert torch.equal(coords, x.coords_man.get_coords(x.coords_man.stride(x.coords_key, factor)))


def test_labels_of_coarser_maps(ME4):
    cm = ME4.CoordsManager(D=1)
    fine = cm.create_coords_key(torch.IntTensor([[0, c] for c in range(6)]))
    labels = torch.tensor([0, 1, 1, 1, 2, 2])
    coarse = cm.stride(fine, 2)
    for found in (
        cm.permute_label(labels, 3, 2),
        cm.permute_label(labels, 3, target_tensor_stride=[2]),
        cm.permute_label(labels, 3, coarse, fine),
        cm.permute_label(labels, 3, target_coords_key=coarse, label_coords_key=fine),
    ):
        assert found.tolist() == [0, 1, 2]
    assert cm.permute_label(labels, 3, 1) is labels
    with pytest.raises(AssertionError, match="5 labels for a map of 6"):
        cm.permute_label(labels[:5], 3, 2)


# tensors


def test_a_tensor_moves_to_the_cpu_and_to_another_tensor_stride(ME4):
    x = tensor(ME4)
    before = x.C.clone()
    assert x.cpu() is x
    other = ME4.SparseTensor(x.F, coords_key=x.coords_key, coords_manager=x.coords_man)
    assert x.set_tensor_stride([2, 4]) is None and x.tensor_stride == [2, 4]
    assert torch.equal(x.C, before) and other.tensor_stride == [1, 1]
    x.set_tensor_stride(2)
    y = ME4.MinkowskiMaxPooling(2, 2, dimension=2)(x)
    assert y.tensor_stride == [4, 4] and (y.C[:, 1:] % 4 == 0).all()
    key = x.coords_key
    x.set_tensor_stride(2)
    assert x.coords_key == key


def test_slices_of_coarser_tensors(ME4):
    coords = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 3, 2], [0, 0, 0], [1, 1, 1]]).int()
    x = ME4.SparseTensor(torch.arange(5.0)[:, None], coords=coords)
    y = ME4.MinkowskiSumPooling(2, 2, dimension=2)(x)
    for found in (y.slice(x), y.slice(x, slicing_mode=0), y.slice(x, 0)):
        assert found.flatten().tolist() == [1.0, 1.0, 2.0, 1.0, 4.0]
    assert y.cat_slice(x).tolist() == [[1, 0], [1, 1], [2, 2], [1, 0], [4, 4]]
    kept = ME4.MinkowskiPruning()(y, torch.tensor([True, False, True]))
    with pytest.raises(ValueError, match="1 of 4 rows have no cell"):
        kept.slice(x)
    with pytest.raises(ValueError, match="slicing_mode"):
        y.slice(x, slicing_mode=1)


def test_kernels_are_kept(ME4):
    generator = ME4.KernelGenerator(2, 2, dimension=2)
    assert generator.cache == {}
    region, offsets, volume = generator.get_kernel([2, 4], False)
    assert generator.cache == {(2, 4): (region, offsets, volume)} and volume == 4
    assert offsets.tolist() == [[0, 0], [2, 0], [0, 4], [2, 4]]
    assert generator.get_kernel([4, 8], True)[1] is offsets
    for made in (copy.deepcopy(generator), pickle.loads(pickle.dumps(generator))):
        assert made.cache == {} and torch.equal(made.get_kernel((2, 4), False)[1], offsets)


@pytest.mark.parametrize(
    "name, channels, strides",
    [
        ("MinkowskiConvolution", (3, 4), [(1, 1), (2, 2)]),
        ("MinkowskiChannelwiseConvolution", (3,), [(1, 1), (2, 2)]),
        ("MinkowskiMaxPooling", (), [(1, 1), (2, 2)]),
        ("MinkowskiAvgPooling", (), [(1, 1), (2, 2)]),
        ("MinkowskiSumPooling", (), [(1, 1), (2, 2)]),
        ("MinkowskiConvolutionTranspose", (3, 4), [(1, 1), (2, 2)]),  # those that the offsets count on
        ("MinkowskiPoolingTranspose", (), [(1, 1), (2, 2)]),
    ],
)
@pytest.mark.parametrize("given", (False, True))
def test_kernels_that_a_layer_met_are_kept(ME4, name, channels, strides, given):
    """Upstream's own test of its pools reads its offsets there."""
    x = tensor(ME4, channels=3)
    levels = [x, ME4.MinkowskiMaxPooling(2, 2, dimension=2)(x)]
    levels.append(ME4.MinkowskiMaxPooling(2, 2, dimension=2)(levels[1]))
    finer = "Transpose" in name
    layer = getattr(ME4, name)(*channels, kernel_size=3, stride=2, dimension=2).double()
    assert layer.kernel_generator.cache == {}
    for level in levels[1:] if finer else levels[:2]:
        if given and "Channelwise" not in name:
            layer(level, levels[levels.index(level) + (-1 if finer else 1)].coords_key)
        else:
            layer(level)
    cache = layer.kernel_generator.cache
    assert sorted(cache) == strides
    for stride in strides:
        region, offsets, volume = cache[stride]
        assert region == ME4.RegionType.HYPERCUBE and volume == len(offsets) == 9
        assert offsets.abs().max() == stride[0]
    assert copy.deepcopy(layer).kernel_generator.cache == {}


def test_names_of_the_modules(ME4):
    coords = importlib.import_module("MinkowskiEngine.MinkowskiCoords")
    assert coords.set_memory_manager_backend is ME4.set_memory_manager_backend
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ME4.set_memory_manager_backend(ME4.MemoryManagerBackend.PYTORCH)
    assert ME4.convert_to_int_list(2, 3) == [2, 2, 2]


def test_0_5_keeps_its_answers(ME):
    quantize, at = ME.utils.sparse_quantize, {"quantization_size": 2, "ignore_label": 255}
    found = quantize(POINTS, labels=LABELS, return_index=True, **at)
    assert [part.tolist() for part in found] == [[[0, 0, 0], [0, 0, 2]], [255, 9], [0, 2]]
    coords = ME.utils.sparse_collate([np.array([[-0.5, 1.5]])], [np.ones((1, 1))])[0]
    assert coords.tolist() == [[0, -1, 1]]
    x = ME.SparseTensor(torch.arange(4.0)[:, None], GAPS)
    assert [len(part) for part in x.decomposed_features] == [2, 0, 2]
    assert (
        not hasattr(x, "cpu") and len(ME.utils.quantization.quantize_label(POINTS.astype(np.int32), LABELS, 255)) == 3
    )
    y = ME.MinkowskiSumPooling(2, 2, dimension=1)(x)
    with pytest.raises(AssertionError, match="same key"):
        y.slice(x)
    assert ME.__version__ == "0.5.4"


def test_values_are_those_of_0_5(ME4):
    """The order of arguments changes no result."""
    coords, feats = scene(2, 3, seed=4)
    x = ME4.SparseTensor(feats, coords)
    torch.manual_seed(0)
    by_name = ME4.MinkowskiConvolution(3, 2, 3, has_bias=True, dimension=2).double()
    by_place = ME4.MinkowskiConvolution(3, 2, 3, 1, 1, True, None, 2).double()
    by_place.load_state_dict(by_name.state_dict())
    checks.assert_close(by_place(x).F.detach(), by_name(x).F.detach(), torch.float64)
