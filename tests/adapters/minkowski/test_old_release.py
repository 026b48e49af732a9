"""MinkowskiEngine 0.4: its names, its arguments, and its rules where 0.5 has others."""

from __future__ import annotations

import copy
import importlib
import logging
import pickle

import numpy as np
import pytest
import torch

import sparse_bridge
from sparse_bridge import settings
from sparse_bridge.errors import LifecycleError, SettingError
from tests import checks

from .scenes import scene


def tensor(ME, dimension=2, channels=3, seed=0, **options):
    coords, feats = scene(dimension, channels, seed=seed)
    return ME.SparseTensor(feats.requires_grad_(), coords=coords, **options)


# the choice of the profile


def test_the_profile_is_said_once(ME4):
    backend = importlib.import_module("MinkowskiEngineBackend")
    assert ME4.__version__ == backend.__version__ == "0.4.3"
    status = sparse_bridge.status()["minkowski"]
    assert status.version == "0.4.3" and "profile 0.4" in status.notes[0]
    with pytest.raises(LifecycleError, match=r"profile '0\.4'"):
        sparse_bridge.enable("minkowski", profile="0.5")
    with sparse_bridge.enable("minkowski", profile="0.4"):
        pass
    with pytest.raises(SettingError, match=r"0\.5, 0\.4"):
        sparse_bridge.enable("minkowski", profile="0.3")


def test_the_setting_chooses_and_0_5_is_the_default():
    with settings.override(minkowski_profile="0.4"), sparse_bridge.enable("minkowski"):
        assert importlib.import_module("MinkowskiEngine").__version__ == "0.4.3"
    with sparse_bridge.enable("minkowski"):
        assert importlib.import_module("MinkowskiEngine").__version__ == "0.5.4"


@pytest.mark.parametrize(
    "call",
    [
        lambda ME: ME.CoordsManager(D=3),
        lambda ME: ME.CoordsKey(3),
        lambda ME: ME.SparseTensor(torch.ones(1, 1), coords=torch.zeros(1, 3).int()),
        lambda ME: ME.MinkowskiConvolution(1, 1, kernel_size=1, has_bias=True, dimension=2),
        lambda ME: ME.SparseTensor(torch.ones(1, 1), torch.zeros(1, 3).int()).coords_key,
    ],
)
def test_a_call_of_0_4_is_recognised(ME, call, caplog):
    with caplog.at_level(logging.WARNING):
        call(ME)
    assert ME.__version__ == "0.4.3" and "profile='0.4'" in caplog.text
    points = np.array([[0.5, 0.5], [0.6, 0.6], [3.0, 1.0]])
    assert ME.utils.sparse_quantize(points, return_index=True).tolist() == [0, 2]


def test_nothing_changes_once_0_5_was_worked_with_or_chosen(ME):
    points = np.array([[0.5, 0.5], [0.6, 0.6], [3.0, 1.0]])
    _, index = ME.utils.sparse_quantize(points, return_index=True)
    assert index.tolist() == [0, 2]
    x = tensor(ME)  # 0.4's keyword is an alias
    assert ME.__version__ == "0.5.4" and x.dense(min_coordinate=torch.full((2,), -4).int())


def test_0_5_by_name_takes_the_aliases_and_keeps_its_rules():
    with sparse_bridge.enable("minkowski", profile="0.5"):
        ME = importlib.import_module("MinkowskiEngine")
        x = tensor(ME)
        assert x.coords_key is x.coordinate_map_key and ME.__version__ == "0.5.4"
        assert type(x.coords_man) is ME.CoordinateManager


# tensors


def test_tensors_by_position_and_by_keyword(ME4):
    ME = ME4
    x = tensor(ME)
    y = ME.SparseTensor(x.F * 2, None, x.coords_key, x.coords_man)
    z = ME.SparseTensor(x.F, coords_key=x.coords_key, coords_manager=x.coords_man)
    assert y.coords_key == z.coords_key == x.getKey() and (y + z).coords_key == x.coords_key
    assert isinstance(x.coords_key, ME.CoordsKey) and isinstance(x.coords_man, ME.CoordsManager)
    assert x.coords_man is y.coords_man is y.coordinate_manager
    checks.assert_close((y + z).feats.detach(), 3 * x.F.detach(), torch.float64)
    coords = torch.tensor([[0, 1, 1], [0, 1, 1], [1, 2, 2]]).int()
    mean = ME.SparseTensor(
        torch.tensor([[1.0], [3.0], [5.0]]),
        coords,
        allow_duplicate_coords=True,
        force_creation=True,
        quantization_mode=ME.SparseTensorQuantizationMode.UNWEIGHTED_AVERAGE,
    )
    assert mean.F.tolist() == [[2.0], [5.0]]
    sliced = mean.slice(mean)
    assert isinstance(sliced, torch.Tensor) and sliced.tolist() == [[2.0], [2.0], [5.0]]
    assert mean.cat_slice(mean).shape == (3, 2)
    assert x.to("cpu") is x


def test_look_up_at_coordinates(ME4):
    x = tensor(ME4)
    query = torch.cat([x.C[::5], torch.tensor([[0, 99, 99]]).int()])
    feats, found = x.features_at_coords(query)
    assert found.tolist() == list(range(len(query) - 1))
    checks.assert_close(feats[:-1].detach(), x.F[::5].detach(), torch.float64)
    assert not feats[-1].any()
    feats.sum().backward()


def test_dense(ME4):
    """The box of the coordinates, contracted: nothing is refused for being negative."""
    ME = ME4
    coords = torch.tensor([[0, -2, 0], [0, 2, 4], [1, 0, 2]]).int()
    x = ME.SparseTensor(torch.tensor([[1.0], [2.0], [3.0]]), coords=coords, tensor_stride=2)
    dense, low, stride = x.dense()
    assert dense.shape == (2, 1, 3, 3) and low.tolist() == [[-1, 0]] and stride.tolist() == [2, 2]
    assert dense[0, 0, 0, 0] == 1 and dense[0, 0, 2, 2] == 2 and dense[1, 0, 1, 1] == 3
    box = {"min_coords": torch.IntTensor([-4, -2]), "max_coords": torch.IntTensor([4, 6])}
    dense, low, _ = x.dense(**box)
    assert dense.shape == (2, 1, 5, 5) and low.tolist() == [[-2, -1]] and dense[0, 0, 1, 1] == 1
    dense, low, _ = x.dense(contract_coords=False, **box)
    assert dense.shape == (2, 1, 9, 9) and low.tolist() == [[-4, -2]] and dense[0, 0, 2, 2] == 1
    dense, low, _ = x.dense(torch.IntTensor([-4, -2]), torch.IntTensor([4, 6]), True)
    assert dense.shape == (2, 1, 5, 5)
    with pytest.raises(IndexError, match="max_coords"):
        x.dense(min_coords=torch.IntTensor([0, 0]))
    with pytest.raises(AssertionError, match="min_coords"):
        x.dense(min_coords=torch.IntTensor([-3, 0]))


def test_shared_manager(ME4):
    ME = ME4
    ME.set_sparse_tensor_operation_mode(ME.SparseTensorOperationMode.SHARE_COORDS_MANAGER)
    a, b = tensor(ME, seed=1), tensor(ME, seed=2, force_creation=True)
    assert a.coords_man is b.coords_man is ME.global_coords_man()
    (a + b).F.sum().backward()
    assert ME.sparse_tensor_operation_mode().name == "SHARE_COORDINATE_MANAGER"


# keys and managers


def test_keys(ME4):
    key = ME4.CoordsKey(2)
    assert not key.isKeySet() and key.D == 2
    key.setTensorStride([1, 2])
    assert key.getTensorStride() == [1, 2] and not key.isKeySet()
    key.setKey(1)
    assert key.isKeySet() and key.getKey() == 1
    for made in (copy.deepcopy(key), pickle.loads(pickle.dumps(key))):
        assert made == key and made.getTensorStride() == [1, 2]
    with pytest.raises(RuntimeError, match="not set"):
        ME4.CoordsKey(1).getKey()


def test_manager(ME4):
    ME = ME4
    cm = ME.CoordsManager(D=1)
    key = ME.CoordsKey(1)
    coords = torch.IntTensor([[0, c] for c in range(-3, 4)] + [[1, 0], [0, 0]])
    unique, inverse = cm.initialize(coords, key, return_inverse=True)
    assert key.isKeySet() and len(unique) == 8 and (coords[unique][inverse] == coords).all()
    coarse = cm.stride(key, [2])
    assert isinstance(coarse, ME.CoordsKey) and coarse.getTensorStride() == [2]
    assert sorted(cm.get_coords(2).tolist()) == [[0, -4], [0, -2], [0, 0], [0, 2], [1, 0]]
    assert cm._get_coords_key(2) == cm.get_coords_key([2]) == coarse == cm._get_coords_key(coarse)
    ins, outs = cm.get_coords_map(1, 2)
    cells = cm.get_coords(coarse)[outs]
    assert (cells[:, 1] == cm.get_coords(key)[ins][:, 1].div(2, rounding_mode="floor") * 2).all()
    assert cm.get_batch_size() == 2 and cm.get_batch_indices() == {0, 1}
    assert [len(rows) for rows in cm.get_row_indices_per_batch(key)] == [7, 1]
    assert cm.get_row_indices_at(key, 1).tolist() == [7]
    assert cm.get_coords_size_by_coords_key(coarse) == 5 and cm.reduce().getTensorStride() == [0]
    assert cm.transposed_stride(coarse, [2], [2], [1]) == key
    more = cm.create_coords_key(torch.IntTensor([[0, 9]]), tensor_stride=1, force_creation=True)
    assert more != key and len(cm.get_coords(more)) == 1
    union = ME.CoordsKey(1)
    ins, outs = cm.get_union_map([key, more], union)
    assert len(cm.get_coords(union)) == 9 and [len(rows) for rows in ins] == [8, 1]
    labels = torch.tensor([0, 1, 1, 2, 2, 0, 0, 1])
    voted = cm.permute_label(labels, 3, coarse, key)
    by_cell = {tuple(c): int(v) for c, v in zip(cm.get_coords(coarse).tolist(), voted, strict=True)}
    assert by_cell == {(0, -4): 0, (0, -2): 1, (0, 0): 2, (0, 2): 0, (1, 0): 1}
    with pytest.raises(AssertionError, match="max_label"):
        cm.permute_label(labels, 2, coarse, key)


def test_kernel_maps_come_as_two_lists(ME4):
    x = tensor(ME4)
    conv = ME4.MinkowskiConvolution(3, 4, kernel_size=3, stride=2, dimension=2).double()
    y = conv(x)
    ins, outs = x.coords_man.get_kernel_map(1, 2, stride=2, kernel_size=3)
    assert len(ins) == len(outs) == 9
    want = torch.zeros_like(y.F)
    for v, (i, o) in enumerate(zip(ins, outs, strict=True)):
        want = want.index_add(0, o.long(), x.F[i.long()] @ conv.kernel[v])
    checks.assert_close(y.F.detach(), want.detach(), torch.float64)
