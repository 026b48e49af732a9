"""Fields across levels, managers and kinds of merging; every answer was worked out by hand."""

from __future__ import annotations

import pytest
import torch

# Five points of one axis in item 0, two in item 1; voxels 0, 1, 3 and 0.
POINTS = [[0, 0.2], [0, 1.5], [0, 0.9], [0, 3.0], [0, 1.25], [1, 0.5], [1, 0.75]]
VALUES = [1.0, 2, -4, 8, 6, 3, -5]
MODES = {
    # mode: features by voxel (item, cell 0, 1, 3 and 0), then by cells of two (0, 2 and 0)
    "UNWEIGHTED_AVERAGE": ([-1.5, 4, 8, -1], [1.25, 8, -1]),
    "UNWEIGHTED_SUM": ([-3.0, 8, 8, -2], [5.0, 8, -2]),
    "RANDOM_SUBSAMPLE": ([1.0, 2, 8, 3], [1.0, 8, 3]),
    "MAX_POOL": ([1.0, 6, 8, 3], [6.0, 8, 3]),
}
# gradients of the sum over cells of two, by point
GRADIENTS = {
    "UNWEIGHTED_AVERAGE": [0.25, 0.25, 0.25, 1, 0.25, 0.5, 0.5],
    "UNWEIGHTED_SUM": [1.0] * 7,
    "RANDOM_SUBSAMPLE": [1.0, 0, 0, 1, 0, 1, 0],
    "MAX_POOL": [0.0, 0, 0, 1, 1, 1, 0],
}


def field_of(ME, mode="UNWEIGHTED_AVERAGE", points=POINTS, values=VALUES, **how):
    features = torch.tensor(values)[:, None].requires_grad_()
    mode = getattr(ME.SparseTensorQuantizationMode, mode)
    field = ME.TensorField(features, torch.tensor(points), quantization_mode=mode, **how)
    return field, features


@pytest.mark.parametrize("mode", MODES)
def test_every_way_of_merging(ME, mode):
    field, _ = field_of(ME, mode)
    x = field.sparse()
    assert x.C.tolist() == [[0, 0], [0, 1], [0, 3], [1, 0]]
    assert x.F[:, 0].tolist() == MODES[mode][0]
    assert field.inverse_mapping(x.coordinate_map_key).tolist() == [0, 1, 0, 2, 1, 3, 3]
    coarse = field.sparse(tensor_stride=2)
    assert coarse.C.tolist() == [[0, 0], [0, 2], [1, 0]] and coarse.tensor_stride == [2]
    assert coarse.F[:, 0].tolist() == MODES[mode][1]
    assert field.inverse_mapping(coarse.coordinate_map_key).tolist() == [0, 0, 0, 1, 0, 2, 2]


@pytest.mark.parametrize("mode", MODES)
def test_merging_onto_the_map_of_a_layer(ME, mode):
    """Points onto a map that a strided layer made: joined with what the layer says there."""
    field, features = field_of(ME)
    down = ME.MinkowskiConvolution(1, 2, kernel_size=3, stride=2, dimension=1)
    y = down(field.sparse())
    mode_named = getattr(ME.SparseTensorQuantizationMode, mode)
    x = field.sparse(coordinate_map_key=y.coordinate_map_key, quantization_mode=mode_named)
    assert x.coordinate_map_key == y.coordinate_map_key and x.tensor_stride == [2]
    assert torch.equal(x.C, y.C) and x.C.tolist() == [[0, 0], [0, 2], [1, 0]]
    assert x.F[:, 0].tolist() == MODES[mode][1]
    both = ME.cat(x, y)
    assert both.F.shape == (3, 3)
    x.F.sum().backward()
    assert features.grad[:, 0].tolist() == GRADIENTS[mode]


def test_every_call_makes_a_map_of_its_own(ME):
    field, _ = field_of(ME)
    made = [field.sparse(), field.sparse(), field.sparse(2), field.sparse(2)]
    keys = [x.coordinate_map_key for x in made]
    assert len(set(keys)) == 4 and keys[0].get_key() == ([1], "") and keys[2].get_key() == ([2], "")
    for x in made:
        rows = field.inverse_mapping(x.coordinate_map_key)
        assert x.slice(field).F[:, 0].tolist() == x.F[rows, 0].tolist()
    with pytest.raises(AssertionError, match="same coordinate_map_key"):
        ME.cat(made[0], made[1])
    assert (made[0] + made[1]).F[:, 0].tolist() == [-3, 8, 16, -2]


def test_slices_of_far_levels(ME):
    """Two layers of stride 4: points come back from cells of sixteen."""
    points = [[0, -20.5], [0, -16.0], [0, -0.1], [0, 0.0], [0, 15.9], [0, 31], [0, 32]]
    field, features = field_of(ME, points=points)
    pool = ME.MinkowskiSumPooling(kernel_size=4, stride=4, dimension=1)
    y = pool(pool(field.sparse()))
    assert y.tensor_stride == [16]
    assert sorted(y.C[:, 1].tolist()) == [-32, -16, 0, 16, 32]
    # cells: [-32, -16): 1; [-16, 0): 2 - 4; [0, 16): 8 + 6; [16, 32): 3; [32, 48): -5
    out = y.slice(field)
    assert out.F[:, 0].tolist() == [1, -2, -2, 14, 14, 3, -5]
    both = y.cat_slice(field)
    assert torch.equal(both.F[:, 1], features[:, 0]) and torch.equal(both.C, field.C)
    out.F.sum().backward()
    assert features.grad[:, 0].tolist() == [1, 2, 2, 2, 2, 1, 1]


def test_points_of_voxels_of_their_own(ME):
    """Nothing merges, so rows stay in the order of the points whatever the mode."""
    points = [[1, 5.5], [0, -2.5], [0, 7.25], [1, -9.0]]
    for mode in MODES:
        field, _ = field_of(ME, mode, points, VALUES[:4])
        x = field.sparse()
        assert x.C.tolist() == [[1, 5], [0, -3], [0, 7], [1, -9]]
        assert x.F[:, 0].tolist() == VALUES[:4]
        assert field.inverse_mapping(x.coordinate_map_key).tolist() == [0, 1, 2, 3]
    field, _ = field_of(ME, "RANDOM_SUBSAMPLE", points, VALUES[:4])
    assert field.sparse().slice(field).F[:, 0].tolist() == VALUES[:4]


def test_points_that_join_the_manager_of_a_tensor(ME):
    x = ME.SparseTensor(torch.tensor([[1.0], [2], [4]]), torch.tensor([[0, 0], [0, 1], [0, 4]], dtype=torch.int32))
    field, _ = field_of(
        ME, points=[[0, 4.5], [0, 0.5], [0, 0.25]], values=VALUES[:3], coordinate_manager=x.coordinate_manager
    )
    assert field.coordinate_manager is x.coordinate_manager
    assert x.slice(field).F[:, 0].tolist() == [4, 1, 1]
    assert x.interpolate(field).F[:, 0].tolist() == [2, 1.5, 1.25]
    y = field.sparse(coordinate_map_key=x.coordinate_map_key)
    assert y.F[:, 0].tolist() == [-1, 0, 1]  # no point in the second voxel
    assert (x + y).F[:, 0].tolist() == [0, 2, 5]
    apart, _ = field_of(ME)
    with pytest.raises(AssertionError, match="one coordinate manager"):
        x.slice(apart)


def test_splatting_and_interpolating_are_each_others_transpose(ME):
    field, features = field_of(ME, points=[[0, 0.25], [0, 1.5], [1, 2.0]], values=[4.0, 2, 8])
    x = field.splat()
    sites = {tuple(site): value for site, value in zip(x.C.tolist(), x.F[:, 0].tolist(), strict=True)}
    assert sites == {(0, 0): 3, (0, 1): 1 + 1, (0, 2): 1, (1, 2): 8, (1, 3): 0}
    back = x.interpolate(field)
    assert back.F[:, 0].tolist() == [2.75, 1.5, 8] and torch.equal(back.C, field.C)
    back.F[0].sum().backward()
    # 0.75 of the site 0, 0.25 of the site 1: 0.75^2 + 0.25^2 and 0.25 * 0.5
    assert features.grad[:, 0].tolist() == [0.625, 0.125, 0]


def test_gradients_of_interpolation(ME):
    coords = torch.tensor([[0, 0, 0], [0, 1, 0], [0, 1, 1]], dtype=torch.int32)
    x = ME.SparseTensor(torch.tensor([[8.0], [4], [16]]).requires_grad_(), coords)
    out = x.features_at_coordinates(torch.tensor([[0, 0.5, 0.25]]))
    # weights 0.5 * 0.75, 0.5 * 0.75 and 0.5 * 0.25; the corner (0, 1) is absent
    assert out.tolist() == [[3 + 1.5 + 2]]
    (gradient,) = torch.autograd.grad(out.sum(), x.F)
    assert gradient[:, 0].tolist() == [0.375, 0.375, 0.125]


def test_coordinates_of_any_layout(ME):
    """Columns of a larger tensor, batch index last, and rows taken with a step."""
    columns = torch.tensor(POINTS).T.contiguous().T
    assert not columns.is_contiguous()
    x = ME.TensorField(torch.tensor(VALUES)[:, None], columns).sparse()
    assert x.F[:, 0].tolist() == MODES["UNWEIGHTED_AVERAGE"][0]
    flipped = torch.tensor(POINTS).flip(1)
    y = ME.TensorField(torch.tensor(VALUES)[::2, None], flipped[:, [1, 0]][::2]).sparse()
    assert y.C.tolist() == [[0, 0], [0, 1], [1, 0]] and y.F[:, 0].tolist() == [-1.5, 6, -5]


def test_a_field_by_its_key(ME):
    field, features = field_of(ME)
    other = ME.TensorField(
        2 * features,
        coordinate_field_map_key=field.coordinate_field_map_key,
        coordinate_manager=field.coordinate_manager,
    )
    assert torch.equal(other.C, field.C) and other.coordinate_key == field.coordinate_key
    assert (field + other).F[:, 0].tolist() == [3 * value for value in VALUES]
    assert ME.cat(field, other).F.shape == (7, 2)
    x = field.sparse()
    assert x.slice(other).F[:, 0].tolist() == x.slice(field).F[:, 0].tolist()
    rows, points = field.coordinate_manager.field_to_sparse_map(field.coordinate_field_map_key, x.coordinate_map_key)
    assert rows.tolist() == [0, 1, 0, 2, 1, 3, 3] and points.tolist() == list(range(7))
    (known,) = field.coordinate_manager.field_to_sparse_keys(field.coordinate_key)
    assert known == x.coordinate_map_key


def test_networks_from_points_to_points(ME):
    """Layers on points, voxels, a strided layer and back, several times with one field."""
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(60, 4, generator=generator) * 6
    points[:, 0] = (points[:, 0] > 3).float()
    field = ME.TensorField(torch.rand(60, 3, generator=generator), points)
    network = torch.nn.Sequential(
        ME.MinkowskiLinear(3, 8),
        ME.MinkowskiBatchNorm(8),
        ME.MinkowskiReLU(),
        ME.MinkowskiToSparseTensor(),
        ME.MinkowskiConvolution(8, 5, kernel_size=3, stride=2, dimension=3),
    )
    for _ in range(3):
        x = network(field)
        rows = {tuple(site): row for site, row in zip(x.C.tolist(), x.F, strict=True)}
        cells = torch.cat([points[:, :1], (points[:, 1:] / 2).floor() * 2], 1).int().tolist()
        want = torch.stack([rows[tuple(cell)] for cell in cells])
        out, both = x.slice(field), x.cat_slice(field)
        assert torch.equal(out.F, want) and len(out) == len(field)
        assert torch.equal(both.F, torch.cat([want, field.F], 1))
        both.F.sum().backward()
    assert network[0].linear.weight.grad.abs().sum() > 0
