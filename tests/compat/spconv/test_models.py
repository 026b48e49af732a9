"""The spconv models of the matrix: published shapes, the real library's numbers, known touches."""

from __future__ import annotations

import copy

import pytest
import torch

from compat import matrix
from compat.subject import flatten
from sparse_bridge import settings
from tests.adapters.spconv import apis

from .published import PUBLISHED, WHOLE
from .small import blob, module_of, run

MODELS = {model.name: model for model in matrix.load() if model.framework == "spconv"}


@pytest.fixture
def unfilled(monkeypatch):
    """Networks of any size at no cost: parameters without memory."""
    monkeypatch.setattr(torch.nn.init, "normal_", lambda tensor, **_: tensor)
    with torch.device("meta"):
        yield


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_have_the_published_names_and_shapes(library, name, unfilled):
    model = MODELS[name]
    network = module_of(model.module.rpartition(".")[2]).build(**model.options)
    state = network.state_dict()
    found = {key: tuple(state[key].shape) for key in PUBLISHED[name] if key in state}
    assert found == PUBLISHED[name]


@pytest.mark.parametrize("name", WHOLE)
def test_whole_models_have_the_published_names_and_shapes(library, name, unfilled):
    state = module_of(name).build().state_dict()
    assert {key: tuple(state[key].shape) for key in WHOLE[name] if key in state} == WHOLE[name]


def test_trellis2_widths_and_depths(library, unfilled):
    network = module_of("trellis2_vae").build()
    state = network.state_dict()
    assert state["encoder.0.0.conv1.conv.weight"].shape == (16, 3, 3, 3, 64)
    assert state["decoder.0.4.conv1.conv.weight"].shape == (4096, 3, 3, 3, 1024)
    depths = [len(blocks) for blocks in network.encoder]
    assert depths == [0 + 1, 4 + 1, 8 + 1, 16 + 1, 4]


def test_second_halves_the_height_as_published(library):
    scene = blob((48, 40, 41), 4)
    _, network, result = run("second", scene, grid_size=(48, 40, 40))
    stages = result["multi_scale_3d_features"].values()
    assert [x.spatial_shape for x in stages] == [[41, 40, 48], [21, 20, 24], [11, 10, 12], [5, 5, 6]]
    assert result["encoded_spconv_tensor"].spatial_shape == [2, 5, 6]
    assert result["spatial_features"].shape == (2, 256, 5, 6)
    result["spatial_features"].square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


def test_bevfusion_keeps_x_first(library):
    scene = blob((48, 40, 41), 5)
    _, _, (spatial, stages) = run("bevfusion", scene, torch.float16, sparse_shape=(48, 40, 41))
    assert spatial.shape == (2, 256, 6, 5) and spatial.dtype == torch.float16
    assert stages[-1].spatial_shape == [6, 5, 5]


@pytest.mark.parametrize("keys", ["record", "none"])
def test_encoders_without_keys_reuse_maps_all_the_same(library, keys):
    """Basic blocks without keys give what the same blocks under one key give."""
    module = module_of("mmdet3d_encoder")
    options = {"in_channels": 4, "sparse_shape": (41, 40, 48), "block_type": "basicblock"}
    torch.manual_seed(0)
    network = module.build(**options).eval()
    arguments = module.batch(blob((48, 40, 41), 4), "cpu", torch.float32)
    want = network(*arguments)[0]
    if keys == "record":
        for number, stage in enumerate(network.encoder_layers):
            for block in stage:
                for layer in (getattr(block, "conv1", None), getattr(block, "conv2", None)):
                    if layer is not None:
                        layer.indice_key = f"res{number}"
    assert torch.equal(network(*arguments)[0], want)


def test_voxelnext_sums_three_strides_in_one_plane(library):
    scene = blob((64, 64, 41), 5)
    module, _, result = run("voxelnext", scene, grid_size=(64, 64, 40), groups=(1, 2))
    x = result["encoded_spconv_tensor"]
    assert x.spatial_shape == [8, 8] and len(torch.unique(x.indices, dim=0)) == len(x.indices)
    assert [sorted(task) for task in result["pred_dicts"]] == [["center", "center_z", "dim", "hm", "rot", "vel"]] * 2
    assert all(len(one) == len(x.indices) for one in module.outputs(result))


def test_trellis_wrapper_keeps_maps_and_ranks(library):
    """`replace` carries the kernel maps on, and features of any rank."""
    wrapper = module_of("trellis_sparse")
    scene = blob((8, 8, 8), 6)
    x = wrapper.SparseTensor(scene.features, scene.coords)
    conv = wrapper.SparseConv3d(6, 6, 3, indice_key="res_8")
    y = conv(x)
    heads = y.replace(y.feats.view(-1, 2, 3))
    assert heads.feats.shape[1:] == (2, 3) and heads.shape == (2, 2, 3)
    assert heads.data.indice_dict["res_8"] is y.data.indice_dict["res_8"]
    again = conv(heads.replace(heads.feats.flatten(1)))
    torch.testing.assert_close(again.feats, conv(y).feats)
    half = wrapper.SparseDownsample(2)(y)
    back = wrapper.SparseUpsample()(half)
    assert torch.equal(back.coords, y.coords) and back._scale == y._scale
    assert wrapper.SparseSubdivide()(half).coords.shape[0] == 8 * len(half.coords)


def test_trellis_strided_layers_sort_their_rows(library):
    wrapper = module_of("trellis_sparse")
    scene = blob((8, 8, 8), 6)
    x = wrapper.SparseTensor(scene.features, scene.coords)
    y = wrapper.SparseConv3d(6, 4, 3, stride=2, padding=1)(x)
    assert y.coords[:, 0].diff().min() >= 0 and y.shape == (2, 4)
    assert [part.stop - part.start for part in y.layout] == y.coords[:, 0].bincount().tolist()


def test_trellis2_grows_where_it_predicts(library):
    options = {"model_channels": (16, 32), "num_blocks": (0, 1), "latent_channels": 4}
    scene = blob((16, 16, 16), 6)
    _, network, guided = run("trellis2_vae", scene, **options)
    assert torch.equal(torch.unique(guided["out"].coords, dim=0), torch.unique(scene.coords, dim=0))
    module = module_of("trellis2_vae")
    grown = network.eval()(*module.batch(scene, "cpu", torch.float32))
    predicted = grown["subdivisions"][0].feats > 0
    assert len(grown["out"].coords) == int((predicted.sum(1).clamp(min=1)).sum())


def test_a_step_of_the_flow_keeps_rows_and_the_decoder_splits_them(library):
    options = {
        "model_channels": 128,
        "io_channels": 16,
        "cond_channels": 24,
        "num_blocks": 1,
        "decoder_channels": 256,
        "decoder_blocks": 1,
    }
    scene = blob((16, 16, 16), 8, rows=40)
    torch.manual_seed(0)
    module = module_of("sam3d_objects")
    network = module.build(**options)
    slat, mesh = network(*module.batch(scene, "cpu", torch.float32, cond_channels=24))
    assert torch.equal(slat.coords, scene.coords) and len(mesh.feats) == 64 * len(scene.coords)
    assert torch.equal(torch.unique(mesh.coords // torch.tensor([1, 4, 4, 4]), dim=0), scene.coords)
    mesh.feats.square().mean().backward()
    assert all(p.grad is not None for p in network.parameters())


def test_skinning_weights_of_every_vertex_sum_to_one(library):
    options = {
        "enc_depths": (1, 2),
        "enc_channels": (8, 16),
        "enc_num_head": (2, 2),
        "feat_dim": 16,
        "num_heads": 2,
        "mlp_dim": 8,
        "num_bone_attn": 1,
        "num_mesh_bone_attn": 1,
        "latents": 4,
        "patch_size": 16,
    }
    scene = blob((16, 16, 16), 3)
    _, network, weights = run("unirig", scene, **options)
    assert weights.shape == (len(scene.coords), 12)
    torch.testing.assert_close(weights.sum(1), torch.ones(len(weights)))
    assert not torch.allclose(weights[0], weights[-1])
    weights.square().sum().backward()
    assert all(p.grad is not None for p in network.parameters())


def test_gaussians_keep_their_rows(library):
    """Several in a voxel, some outside: one output row each, in order."""
    module = module_of("gaussianformer")
    network = module.build(embed_dims=8)
    feature, anchor = module.batch(blob((24, 24, 8), 8), "cpu", torch.float32)
    anchor[0, 0] = torch.tensor([100.0, 100.0, 8.0])
    anchor[0, 2] = anchor[0, 1]
    out = network(feature, anchor)
    assert out.shape == feature.shape
    swapped = feature.clone()
    swapped[0, 0] += 1.0
    assert torch.equal(network(swapped, anchor)[0, 1:], out[0, 1:])


def test_export_hooks_see_every_layer_and_leave_nothing(library):
    convolution = library.conv.SparseConvolution
    before = convolution.forward, convolution.__repr__
    module = module_of("lidar_export")
    network = module.build(5).eval()
    arguments = module.batch(blob((48, 40, 41), 5), "cpu", torch.float32)
    result = network(*arguments)
    assert (convolution.forward, convolution.__repr__) == before
    graph = result["graph"]
    assert len(graph) == 21 and {node["activation"] for node in graph} == {"None", "ReLU"}
    down = [node for node in graph if not node["subm"]]
    assert [node["output_spatial_shape"][0] for node in down] == [21, 11, 5, 2]
    assert "16>16" in result["text"]
    plain = module_of("centerpoint")
    torch.manual_seed(3)
    reference = plain.build(5).eval()
    for norm in reference.modules():
        if isinstance(norm, torch.nn.BatchNorm1d):
            torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
            norm.running_mean.normal_()
    want = reference(*arguments)[0]
    module.fuse(reference)
    torch.testing.assert_close(reference(*arguments)[0], want, rtol=1e-4, atol=1e-4)


def published_cylinder(module, scene, dtype=torch.float64):
    torch.manual_seed(0)
    options = {"output_shape": (32, 32, 16), "init_size": 4, "num_input_features": 3}
    network = module.build(**options, nclasses=5).to(dtype).eval()
    coords = scene.coords.clone()
    return network, (scene.features.to(dtype), coords, scene.batch_size)


def test_cylinder3d_needs_first_generation_keys(library):
    """Its published weights were trained with one map for all kernels of a key."""
    module = module_of("cylinder3d")
    network, arguments = published_cylinder(module, blob((32, 32, 16), 3))
    with pytest.raises(ValueError, match="SPARSE_BRIDGE_RULES=shared_keys"):
        network(*arguments)
    with settings.override(shared_keys=True):
        got = network(*arguments)
    first: dict[str, list[int]] = {}
    twin = copy.deepcopy(network)
    for layer in twin.modules():
        if isinstance(layer, library.SubMConv3d):
            taken = first.setdefault(layer.indice_key, layer.kernel_size)
            volume = taken[0] * taken[1] * taken[2]
            weight = layer.weight.detach().flatten(1, -2)[:, :volume]
            layer.kernel_size = taken
            layer.weight.data = weight.reshape(len(weight), *taken, -1).contiguous()
    torch.testing.assert_close(twin(*arguments), got)
    other = module.build(output_shape=(32, 32, 16), init_size=4, num_input_features=3, nclasses=5, modern=True)
    other.load_state_dict(network.state_dict())
    ported = other.double().eval()(*arguments)
    assert not torch.allclose(ported, got)


# model -> (grid, features, options): small enough for the wheel's CPU kernels
COMPARED = {
    "second": ((48, 40, 41), 4, {"grid_size": (48, 40, 40)}),
    "part_a2": ((48, 40, 41), 4, {"grid_size": (48, 40, 40)}),
    "voxelnext": ((64, 64, 41), 5, {"grid_size": (64, 64, 40), "groups": (1, 2)}),
    "lion": ((64, 64, 41), 5, {"sparse_shape": (41, 64, 64), "dim": 16, "layers": 2}),
    "sphereformer": ((64, 64, 32), 4, {"planes": (8, 12, 16)}),
    "cylinder3d": (
        (64, 64, 32),
        3,
        {"modern": True, "output_shape": (480, 360, 32), "init_size": 4, "num_input_features": 3},
    ),
    "trellis2_vae": ((16, 16, 16), 6, {"model_channels": (16, 32), "num_blocks": (0, 1)}),
    "softgroup": ((64, 64, 64), 6, {"channels": 8, "num_blocks": 3}),
}
QUICK = ("part_a2", "voxelnext", "sphereformer")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in COMPARED]
)
def test_bridged_equals_native(loaded, one_thread, name):
    """Outputs and gradients in training mode, with the wheel's own kernels and with these."""
    if loaded[1] != "patch":
        pytest.skip("the spconv wheel is not installed")
    grid, features, options = COMPARED[name]
    scene = blob(grid, features)
    with apis.patched():
        bridged, gradients = trained(name, scene, options)
    native, expected = trained(name, scene, options)
    for got, want in zip(bridged, native, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)
    assert gradients.keys() == expected.keys()
    for key, want in expected.items():
        torch.testing.assert_close(gradients[key], want, rtol=1e-6, atol=1e-9, msg=key)


def trained(name, scene, options):
    """Outputs and gradients of one pass in fp64."""
    module, network, result = run(name, scene, torch.float64, **options)
    outputs = list(flatten(module.outputs(result) if hasattr(module, "outputs") else result))
    sum(one.sin().mean() for one in outputs).backward()
    gradients = {key: p.grad for key, p in network.named_parameters() if p.grad is not None}
    return [one.detach() for one in outputs], gradients


STANDIN = """
import sparse_bridge
sparse_bridge.enable("spconv", mode="standin")
sparse_bridge.enable("minkowski")
from compat.subject import flatten
from tests.compat.spconv.small import blob, run

SMALL = {
    "second": ((48, 40, 41), 4, {"grid_size": (48, 40, 40)}),
    "pointgroup": ((64, 64, 64), 6, {"m": 4}),
    "neuralbody": ((24, 24, 24), 3, {}),
    "cylinder3d": ((40, 40, 16), 3, {"init_size": 4, "num_input_features": 3, "nclasses": 2}),
    "oneformer3d": ((64, 64, 64), 6, {"num_channels": 8, "num_planes": (8, 12)}),
    "lidar_export": ((48, 40, 41), 5, {}),
}
import spconv
assert spconv.SubMConv3d and "sparse_bridge" in spconv.__file__
for name, (grid, features, options) in SMALL.items():
    scene, train = blob(grid, features), name != "lidar_export"
    module, network, result = run(name, scene, train=train, **options)
    outputs = list(flatten(module.outputs(result) if hasattr(module, "outputs") else result))
    assert outputs and all(one.isfinite().all() for one in outputs)
    if network.training:
        sum(one.sin().mean() for one in outputs).backward()
        assert all(p.grad is not None for p in network.parameters())
    print(name)
layers = sparse_bridge.report().layers["spconv"]
assert not any(count.original for count in layers.values())
"""


@pytest.mark.slow
def test_models_run_on_the_standin():
    """Both generations' imports, an older key rule, and two frameworks in one model."""
    done = apis.python(STANDIN, SPARSE_BRIDGE_RULES="shared_keys")
    assert done.split() == ["second", "pointgroup", "neuralbody", "cylinder3d", "oneformer3d", "lidar_export"]
