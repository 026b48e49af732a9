"""The MinkowskiEngine models: published names and shapes, and what their stacks promise."""

from __future__ import annotations

import pytest
import torch

from compat import matrix, scenes

from . import loading
from .published_minkowski import FACTS

MODELS = {m.module.rpartition(".")[2]: m for m in matrix.load() if m.framework == "minkowski"}
CPU = torch.device("cpu")


@pytest.fixture
def load():
    with loading.models("minkowski") as load:
        yield load


@pytest.mark.parametrize(("name", "options", "wanted", "millions"), FACTS)
def test_names_and_shapes_of_checkpoints(load, name, options, wanted, millions):
    options = MODELS[name].options if options is None else options
    found = loading.shapes(load(name).build, **options)
    assert {key: found.get(key) for key in wanted} == wanted
    assert loading.count(found) == millions


def scene(size="small", features=3, dimension=3, **how):
    """Shells: the cheapest surfaces."""
    return scenes.make("codec", size, features, dimension, **how)


def cells(coords):
    return {tuple(row) for row in coords.tolist()}


def test_scenes_go_through_both_minkunets_alike(load):
    """Pointcept's dictionary of points and the examples' SparseTensor, in fp64."""
    data = scene(features=6)
    theirs, examples = load("pointcept_minkunet"), load("minkunet")
    shallow = {"LAYERS": (1,) * 8, "PLANES": (8, 8, 12, 12, 12, 8, 8, 8), "INIT_DIM": 8}
    network = type("Examples14", (examples.VARIANTS["MinkUNet34"],), shallow)(6, 20)
    network = loading.stir(network).double().eval()
    other = type("Points14", (theirs.MinkUNet34C,), shallow)(6, 20).double().eval()
    loading.copy_weights(network, other)
    want = network(*examples.batch(data, CPU, torch.float64))
    assert torch.equal(want.C, data.coords)
    got = other(*theirs.batch(data, CPU, torch.float64))
    torch.testing.assert_close(got, want.F, rtol=1e-9, atol=1e-9)


def test_points_of_one_voxel_get_one_answer(load):
    """4DMOS: floats in, metres out, no probability for the unlabeled class."""
    data = scene(dimension=4, features=1)
    module = load("four_dmos")
    network = module.build(voxel_size=2.0).eval()
    (clouds,) = module.batch(data, CPU, torch.float32)
    with torch.no_grad():
        out = network(clouds)
    (probability,) = module.outputs(out)
    assert torch.equal(probability[:, 0], torch.zeros(len(probability)))
    torch.testing.assert_close(out.coordinates[:, 1:], torch.cat(clouds), rtol=1e-5, atol=1e-4)
    quantized = torch.cat(clouds) / torch.tensor([2.0, 2.0, 2.0, 1.0])
    keys = torch.cat([data.coords[:, :1], torch.floor(quantized).int()], dim=1)
    voxels, index = keys.unique(dim=0, return_inverse=True)
    assert len(voxels) < len(keys)
    spread = torch.zeros(len(voxels)).scatter_reduce_(0, index, probability[:, 1], "amax")
    torch.testing.assert_close(spread[index], probability[:, 1])


def test_names_of_0_4_give_the_network_of_0_5(load):
    data = scene()
    new, old = load("res16unet"), load("pointcontrast")
    torch.manual_seed(0)
    narrow = {"LAYERS": (1,) * 8, "PLANES": (8, 10, 12, 14, 16, 12, 10, 8), "INIT_DIM": 6}
    first = type("New", (new.Res16UNet34C,), narrow)(3, 32)
    second = type("Old", (old.PointContrastNet,), narrow)(3, 32, normalize_feature=False)
    first = loading.stir(first).double().eval()
    loading.copy_weights(first, second.double()).eval()
    (x,) = old.batch(data, CPU, torch.float64)
    want, levels = first(x)
    assert torch.equal(second(x).F, want.F)
    assert [level.tensor_stride[0] for level in levels] == [16, 8, 4, 2, 1]
    assert [level.F.shape[1] for level in levels] == [14, 16, 12, 10, 8]
    assert torch.equal(levels[-1].C, data.coords)


def test_squeeze_and_excitation_scales_each_item(load):
    module = load("pointcontrast")
    (x,) = module.batch(scene("tiny", features=32), CPU, torch.float32)
    layer = module.SELayer(32, D=3)
    gains = layer(x).F / x.F
    for rows in x.decomposition_permutations:
        if len(rows):
            torch.testing.assert_close(gains[rows], gains[rows[:1]].expand(len(rows), -1))
    assert ((gains > 0) & (gains < 1)).all()


def test_fcgf_returns_unit_features_of_the_input_voxels(load):
    data = scene()
    module = load("fcgf")
    (x,) = module.batch(data, CPU, torch.float32)
    y = module.build().eval()(x)
    assert cells(y.C) == cells(data.coords)
    torch.testing.assert_close(y.F.norm(dim=1), torch.ones(len(y)))


def test_mask3d_averages_positions_level_by_level(load):
    data = scene()
    module, res16unet = load("mask3d"), load("res16unet")
    x, raw = module.batch(data, CPU, torch.float64)
    network = module.build(num_queries=4, sample_sizes=(8, 16, 32, 64)).double().eval()
    levels = network.pooled_positions(raw, x, 3)
    coarse = data.coords.clone()
    coarse[:, 1:] = coarse[:, 1:] // 2
    keys, index, counts = coarse.unique(dim=0, return_inverse=True, return_counts=True)
    means = torch.zeros(len(keys), 3, dtype=torch.float64).index_add_(0, index, raw)
    means = means / counts.unsqueeze(1)
    for item in (0, 1):
        mine = levels[1][item]
        rows = keys[:, 0] == item
        order, other = mine[:, 0].argsort(), means[rows][:, 0].argsort()
        torch.testing.assert_close(mine[order], means[rows][other])
        assert torch.equal(levels[2][item], raw[data.coords[:, 0] == item])
    assert issubclass(type(network.backbone), res16unet.Res16UNetBase)
    result = network(x, raw)
    assert [len(logits) for logits in result["pred_logits"]] == [2] * 5
    assert all(mask.F.shape == (len(data.coords), 4) for mask in result["pred_masks"])


def test_reconstruction_keeps_every_voxel_of_the_target(load):
    data = scene(features=1, batch_size=1)
    module, completion = load("reconstruction"), load("completion")
    widths = {"CHANNELS": (12, 10, 8, 8, 6, 6, 4)}
    network = type("Narrow", (completion.GenerativeNet,), widths)(in_nchannel=8)
    z_in, target_key = module.batch(data, CPU, torch.float32, in_nchannel=8)
    assert z_in.tensor_stride == [64, 64, 64]
    out_cls, targets, out = network.train()(z_in, target_key)
    assert [level.tensor_stride[0] for level in out_cls] == [16, 8, 4, 2, 1]
    assert cells(completion.shape(data, CPU)) <= cells(out.C)
    assert int(targets[-1].sum()) == len(data.coords)
    module.loss((out_cls, targets, out)).backward()
    assert all(p.grad is not None for p in network.parameters())


def test_completion_joins_what_it_grows_with_what_it_saw(load):
    data = scene(features=1, batch_size=1)
    module = load("completion")
    widths = {"ENC_CHANNELS": (4, 4, 6, 6, 8), "DEC_CHANNELS": (4, 4, 6, 6, 8)}
    network = type("Narrow", (module.CompletionNet,), widths)(1)
    partial_in, target_key = module.batch(data, CPU, torch.float32)
    assert 0 < len(partial_in) < len(data.coords)
    out_cls, _, out = network.train()(partial_in, target_key)
    assert [level.tensor_stride[0] for level in out_cls] == [8, 4, 2, 1]
    assert cells(partial_in.C) <= cells(out_cls[-1].C)  # the union
    assert cells(data.coords) <= cells(out.C)
    module.loss((out_cls, _, out)).backward()
    assert network.enc_block_s1[0].kernel.grad.any()


def test_pcgc_decodes_as_many_voxels_as_it_encoded(load):
    data = scene(features=1)
    module = load("pcgc")
    network = module.build()
    (x,) = module.batch(data, CPU, torch.float32)
    with torch.no_grad():
        result = network.eval()(x)
    assert result["prior"].tensor_stride == [8, 8, 8] and result["prior"].F.shape[1] == 8
    assert [len(c) for c in result["out"].decomposed_coordinates] == [len(c) for c in x.decomposed_coordinates]
    trained = network.train()(x)["out"]
    assert cells(data.coords) <= cells(trained.C)


def test_sparse_pcgc_walks_through_the_scales(load):
    data = scene(features=1, batch_size=1)
    module = load("sparse_pcgc")
    network = module.build(channels=8, block_layers=1)
    result = network(*module.batch(data, CPU, torch.float32))
    (logits, occupied, fine), (_, _, coarse) = result
    assert cells(fine.C) == cells(data.coords)
    assert len(logits) == 8 * len(coarse) and int(occupied.sum()) == len(data.coords)
    assert fine.tensor_stride == [1, 1, 1] and coarse.tensor_stride == [2, 2, 2]
    module.loss(result).backward()
    assert all(p.grad is not None for p in network.parameters())


def test_fcaf3d_keeps_the_best_rows(load):
    data = scene()
    module = load("fcaf3d")
    network = module.build(
        num_classes=3,
        voxel_size=1.0,
        backbone={"depths": (1, 1, 1, 1), "width": 4},
        out_channels=8,
        num_reg_outs=8,
        pts_prune_threshold=9,
    )
    levels = []
    network.head.out_block_0.register_forward_hook(lambda m, args, out: levels.append(out))
    centers, boxes, classes, points = network.train()(*module.batch(data, CPU, torch.float32))
    assert levels[0].tensor_stride == [8, 8, 8]
    assert [len(rows) for rows in centers[0]] == [9, 9]
    assert all(rows.shape[1] == 8 for level in boxes for rows in level)
    assert all(rows.shape[1] == 3 for level in classes for rows in level)
    for level, stride in zip(points, (8, 16, 32, 64), strict=True):
        steps = torch.cat(level) / stride
        torch.testing.assert_close(steps, steps.round())


def test_pasco_reads_faces_only(load):
    data = scene(features=4, batch_size=1)
    module = load("pasco")
    network = module.build(widths=(8, 8, 12))
    (x,) = module.batch(data, CPU, torch.float32)
    logits, per_item = network(x)
    assert [level.tensor_stride[0] for level in logits] == [2, 1] and per_item.shape == (1, 20)
    for block in network.decoder:
        kernel = block.smoothing.conv.kernel
        assert kernel.shape[0] == 27 and int((kernel != 0).any(dim=1).sum()) == 7
    (sum(level.F.square().mean() for level in logits) + per_item.sum()).backward()
    assert all(p.grad is not None for p in network.parameters())


@pytest.mark.parametrize("shift", [False, True])
def test_swin3d_windows_hold_the_voxels_of_one_box(load, shift):
    data = scene()
    module = load("swin3d")
    sp, _ = module.batch(data, CPU, torch.float32)
    coarse = module.GridDownsample(3, 4)(sp)[0]
    for tensor, stride in ((sp, 1), (coarse, 2)):
        window, place, count, longest = module.Windows(5, shift)(tensor)
        moved = tensor.C.clone()
        moved[:, 1:] = (moved[:, 1:] + (2 * stride if shift else 0)) // (5 * stride)
        keys, index = moved.unique(dim=0, return_inverse=True)
        assert len(keys) == count
        pairs = torch.stack([index, window], dim=1).unique(dim=0)
        assert len(pairs) == count  # one window per box, one box per window
        seats = window * longest + place
        assert len(seats.unique()) == len(tensor) and int(place.max()) == longest - 1


def test_swin3d_unpools_along_the_pooling_map(load):
    data = scene()
    module = load("swin3d")
    sp, positions = module.batch(data, CPU, torch.float64)
    down, pairs = module.GridDownsample(3, 4).double()(sp)
    assert torch.equal(pairs[0].sort().values, torch.arange(len(sp)))
    parents = sp.C[pairs[0]].clone()
    parents[:, 1:] = parents[:, 1:] // 2 * 2
    assert torch.equal(down.C[pairs[1]], parents)
    coarse, local = module.GridCoordsDown(2)(positions)
    torch.testing.assert_close(local[pairs[0]], positions.F[pairs[0]] - coarse.F[pairs[1]])


def test_registration_works_in_six_dimensions(load):
    data = scene("tiny", dimension=6, features=1)
    module = load("dgr")
    network = module.build(channels=(4, 4, 6, 6), tr_channels=(4, 4, 4, 6))
    (x,) = module.batch(data, CPU, torch.float32)
    y = network.eval()(x)
    assert network.D == x.D == 6 and torch.equal(y.C, data.coords) and y.F.shape[1] == 1
    y.F.square().mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in network.parameters())
    assert network.conv1.kernel.grad.any()


def test_spine_scores_every_voxel_of_every_level(load):
    """Rows come back in the order they were given; what the masks let through is no gradient."""
    data = scenes.make("lartpc", "small", 1)
    module = load("spine")
    network = module.build(filters=4, depth=3, reps=1)
    result = network(*module.batch(data, CPU, torch.float32))
    coarse, fine = result["ppn_layers"]
    assert coarse.tensor_stride == [2, 2, 2] and torch.equal(fine.C, data.coords)
    assert result["ppn_points"].shape == (len(data.coords), 3 + 5 + 2)
    torch.testing.assert_close(result["ppn_points"][:, -2:], fine.F)
    result["ppn_points"][:, :8].square().sum().backward(retain_graph=True)
    assert network.ppn.ppn_masks[0].linear.weight.grad is None
    coarse.F.square().sum().backward()
    assert network.ppn.ppn_masks[0].linear.weight.grad.abs().sum() > 0


def test_rise_reads_the_coarsest_voxels_as_tokens(load):
    data = scene(features=6, batch_size=2)
    module = load("rise")
    cloud, items = module.batch(data, CPU, torch.float32)
    encoder = module.Sparse3DEncoder(6, 12).eval()
    tokens, positions, padding = encoder(cloud, items, max_num_token=7)
    coarse = encoder.cloud_encoder(cloud)
    assert coarse.tensor_stride == [32] * 3 and bool((coarse.C[:, 1:] % 32 == 0).all())
    for item in range(items):
        mask = coarse.C[:, 0] == item
        count = min(7, int(mask.sum()))
        assert padding[item].tolist() == [False] * count + [True] * (7 - count)
        assert torch.equal(tokens[item, :count], coarse.F[mask][:count])
        assert bool((tokens[item, count:] == 0).all())
    first = coarse.C[0, 1:].float() + 400  # coordinates around the origin
    torch.testing.assert_close(positions[0, 0, :2], torch.stack([first[0].sin(), first[0].cos()]))
    torch.testing.assert_close(positions[0, 0, 8:10], torch.stack([first[2].sin(), first[2].cos()]))
