"""What users of spconv-triton 1.0.0 rely on, by its description: here it is imported by that name
and served by spconv's stand-in or patches. What the real spconv answers on a CPU is compared."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from torch import nn

from sparse_bridge.errors import GeometryError

from . import apis


@pytest.fixture
def peer(sp):
    """`spconv_triton.pytorch` through each API."""
    return importlib.import_module("spconv_triton.pytorch")


def both(ask):
    """What the real spconv answers and what the stand-in does: `ask` takes `spconv.pytorch`."""
    real = ask(apis.wheel())
    with apis.standin() as sp:
        return real, ask(sp)


# its first example, on a CPU


def network(sp):
    torch.manual_seed(0)
    return sp.SparseSequential(
        sp.SubMConv3d(4, 8, 3, padding=1, indice_key="same"),
        sp.SparseConv3d(8, 16, 3, stride=2, padding=1, indice_key="half"),
        sp.SparseInverseConv3d(16, 8, 3, indice_key="half"),
    )


def test_one_changed_import_runs_a_network_and_trains_it(peer):
    x = apis.tensor(peer)
    net = network(peer)
    y = net(x)
    assert torch.equal(y.indices, x.indices) and y.spatial_shape == [7, 8, 9]
    assert y.dense().shape == (2, 8, 7, 8, 9)
    y.dense().square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters())


def test_checkpoints_go_from_one_name_to_the_other(peer):
    import spconv.pytorch as spconv

    theirs, ours = network(spconv), network(peer)
    for parameter in ours.parameters():
        nn.init.zeros_(parameter)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = apis.tensor(peer)
    assert torch.equal(ours(x).features, theirs(x).features)


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 2, 0)])
def test_layers_care_for_no_order_of_axes(peer, order):
    """Sites, grid and weights of another order give the same rows."""
    x = apis.tensor(peer)
    columns = [0, *(1 + axis for axis in order)]
    turned = peer.SparseConvTensor(
        x.features, x.indices[:, columns].contiguous(), [x.spatial_shape[a] for a in order], 2
    )
    first, second = network(peer), network(peer)
    for layer, other in zip(first, second, strict=True):
        axes = [0, *(1 + axis for axis in order), 4]
        other.weight.data.copy_(layer.weight.data.permute(axes))
    torch.testing.assert_close(second(turned).features, first(x).features)


def test_points_are_given_by_xyz_and_voxels_come_by_zyx(peer):
    utils = importlib.import_module("spconv_triton.pytorch.utils")
    voxelizer = utils.PointToVoxel([1, 1, 1], [0, 0, 0, 2, 3, 4], 3, 8, 2)
    _, cells, counts = voxelizer(torch.tensor([[1.5, 2.5, 3.5], [0.5, 1.5, 3.5]]))
    assert cells.tolist() == [[3, 2, 1], [3, 1, 0]] and counts.tolist() == [1, 1]
    assert list(voxelizer.grid_size) == [4, 3, 2]


def test_tf32_is_off_until_the_package_allows_it(peer, monkeypatch):
    import spconv_triton

    from sparse_bridge.adapters.spconv.conv import expected_of

    (before,) = expected_of(peer.SubMConv3d(4, 4, 3))
    monkeypatch.setattr(spconv_triton.constants, "SPCONV_ALLOW_TF32", True)
    (after,) = expected_of(peer.SubMConv3d(4, 4, 3))
    assert before.precision != after.precision


# names


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("core", "AlgoHint ConvAlgo NDIM_DONT_CARE SPCONV_INT8_DEBUG"),
        ("cppconstants", "BoxOps CompileInfo CPU_ONLY_BUILD SpconvOps"),
        ("pytorch.constants", "PYTORCH_VERSION remove_dotdev remove_plus"),
        ("pytorch.conv", "ALL_WEIGHT_IS_KRSC FILTER_HWIO SPCONV_DEBUG_WEIGHT nullcontext spconv"),
        ("pytorch.core", "ConvAlgo SPCONV_FX_TRACE_MODE"),
        ("pytorch.functional", "CUDAKernelTimer ops spconv_save_debug_data"),
        (
            "pytorch.ops",
            "ALL_WEIGHT_IS_KRSC AllocKeys CPU_ONLY_BUILD FILTER_HWIO SPCONV_DO_SORT"
            " SPCONV_USE_DIRECT_TABLE get_current_stream nullcontext torch_tensor_to_tv",
        ),
        ("pytorch.pool", "CPU_ONLY_BUILD Fsp nullcontext ops spconv"),
        ("pytorch.spatial", "RemoveDuplicate SparseModule spconv"),
    ],
)
def test_modules_hold_what_they_import_from_one_another(sp, module, names):
    found = importlib.import_module(f"spconv_triton.{module}")
    assert [name for name in names.split() if not hasattr(found, name)] == []
    if "spconv" in names.split():
        assert found.spconv is sp


WITH_FACTS = (
    "constants",
    "core",
    "tools",
    "pytorch.constants",
    "pytorch.conv",
    "pytorch.core",
    "pytorch.functional",
    "pytorch.ops",
    "pytorch.pool",
)


def test_switches_and_facts_have_the_values_of_spconv():
    """All numbers, words and switches that a module of spconv and one of ours both hold."""

    def plain(sp):
        found = {}
        for name in WITH_FACTS:
            module = importlib.import_module(f"spconv.{name}")
            for key, value in vars(module).items():
                if isinstance(value, (bool, int, float, str)) and not key.startswith("_"):
                    found[name, key] = value
        return found

    real, ours = both(plain)
    of_the_build = {key for key in real if key[1] == "CPU_ONLY_BUILD"}
    assert len(real) > 40 and real.keys() - ours.keys() == set()
    assert {key for key in real if ours[key] != real[key]} == of_the_build


@pytest.mark.parametrize(
    ("ndim", "value"),
    [
        (2, 3),
        (3, [1, 2, 3]),
        (3, (1, 2, 3)),
        (2, torch.tensor([4, 5])),
        (2, np.array([4, 5])),
        (3, torch.Size([1, 2, 3])),
        (2, range(2)),
        (2, [1]),
        (2, None),
        (2, 1.5),
    ],
)
def test_sizes_may_come_as_any_sequence(ndim, value):
    def expanded(sp):
        try:
            return sp.core.expand_nd(ndim, value)
        except (AssertionError, TypeError) as error:
            return next(kind for kind in (AssertionError, TypeError) if isinstance(error, kind))

    real, ours = both(expanded)
    assert real == ours


# tracing by torch.fx


class Constructs(nn.Module):
    """Makes the tensor inside; which arguments are traced differs by `how`."""

    def __init__(self, sp, how):
        super().__init__()
        self.sp, self.how = sp, how
        self.layer = sp.SubMConv3d(4, 5, 3)
        x = apis.tensor(sp)
        self.register_buffer("features", x.features)
        self.register_buffer("indices", x.indices)

    def forward(self, x):
        make, sites = self.sp.SparseConvTensor, self.indices
        if self.how == "features":
            y = make(x.flatten(0, 2)[:60], sites, [7, 8, 9], 2)
        elif self.how == "sizes in a list":
            y = make(self.features, sites, [x.shape[0], x.shape[1], x.shape[2]], 2)
        elif self.how == "by name":
            y = make(features=self.features, indices=sites, spatial_shape=[7, 8, 9], batch_size=x.size(3))
        else:
            y = make(self.features, sites, [7, 8, 9], 2, indice_dict={"seen": x})
        return self.layer(y).dense()


@pytest.mark.parametrize("how", ["features", "sizes in a list", "by name", "a dict"])
def test_a_traced_module_may_make_its_tensor(sp, how):
    net = Constructs(sp, how)
    graph = torch.fx.symbolic_trace(net)
    made = [node for node in graph.graph.nodes if node.target is sp.SparseConvTensor]
    assert len(made) == 1, "the tensor is made anew in every call"
    assert any(node.op == "call_module" and node.target == "layer" for node in graph.graph.nodes)
    for seed in (0, 1):
        torch.manual_seed(seed)
        x = torch.randn(7, 8, 9, 2 if how == "by name" else 4)
        torch.testing.assert_close(graph(x), net(x))


def test_the_class_of_the_class_is_torchs(sp):
    kind = type(sp.SparseConvTensor)
    assert issubclass(kind, torch.fx.ProxyableClassMeta) and kind is sp.core.SpConvTensorMeta

    class Named(sp.SparseConvTensor, metaclass=torch.fx.ProxyableClassMeta):
        pass

    x = apis.tensor(sp)
    y = Named(x.features, x.indices, x.spatial_shape, x.batch_size)
    assert isinstance(sp.SubMConv3d(4, 5, 3)(y), sp.SparseConvTensor)


# data for tests

DATA = [
    ([6, 7, 8], [5, 9], {}),
    ([5, 6], [3], {}),
    ([10], [4, 4, 2], {}),
    ([4, 5, 6, 4], [7, 3], {}),
    ([6, 7, 8], [5, 9], {"integer": True, "data_range": (-5, 6)}),
    ([5, 5], [25], {}),
    ([6, 7, 8], [5, 9], {"shape_scale": 2}),
    ([5, 6], [4], {"with_dense": False}),
    ([5, 6], [0, 4], {"dtype": np.float16}),
    ([9, 6], [6], {"shape_scale": 3}),
]


@pytest.mark.parametrize(("shape", "counts", "more"), DATA)
def test_a_seed_gives_the_points_of_spconv(shape, counts, more):
    def drawn(_):
        made = importlib.import_module("spconv.test_utils").generate_sparse_data
        np.random.seed(3)
        return made(shape, counts, 3, **more), np.random.rand()

    (real, after), (ours, then) = both(drawn)
    assert list(real) == sorted(ours) and after == then
    for name, array in real.items():
        assert array.dtype == ours[name].dtype
        np.testing.assert_array_equal(ours[name], array)


def test_points_of_a_seed_stay_what_they_are(standin):
    from spconv.test_utils import generate_sparse_data

    np.random.seed(3)
    data = generate_sparse_data([4, 4], [3, 2], 2)
    assert data["indices"].tolist() == [[3, 1, 0], [1, 3, 0], [0, 1, 0], [2, 3, 1], [0, 0, 1]]
    np.testing.assert_allclose(data["features"][0], [0.11770818, -0.4814951], rtol=1e-6)
    with pytest.raises(ValueError, match="9 points do not fit on 8 cells"):
        generate_sparse_data([6, 7, 8], [5, 9], 2, shape_scale=3)


# where nothing is left


def layers(sp, ndim):
    """Layers that miss a point at 3, with `ConvAlgo.Native`, which the CPU wheel is bound to."""
    native = {"algo": sp.ConvAlgo.Native}
    conv, pool = getattr(sp, f"SparseConv{ndim}d"), getattr(sp, f"SparseMaxPool{ndim}d")
    return [conv(2, 3, 2, 4, bias=False, **native), pool(2, 4, **native)]


@pytest.mark.parametrize("ndim", [1, 2, 3, 4])
def test_points_that_vanish_leave_no_rows(ndim):
    """As the real spconv on a CPU; on GPUs it raises, as spconv-triton does."""

    def answers(sp):
        x = sp.SparseConvTensor(torch.ones(1, 2), torch.tensor([[0, *[3] * ndim]], dtype=torch.int32), [9] * ndim, 1)
        made = [layer.train(mode)(x) for layer in layers(sp, ndim) for mode in (True, False)]
        return [(tuple(y.features.shape), tuple(y.indices.shape), y.spatial_shape) for y in made]

    real, ours = both(answers)
    assert real == ours and ours[0] == ((0, 3), (0, 1 + ndim), [2] * ndim)


def test_a_grid_that_vanishes_is_an_error_of_either_kind(sp):
    """RuntimeError as in spconv, ValueError as in spconv-triton, and one of this project's."""
    x = apis.tensor(sp, shape=(3, 3, 3), rows=5, batch_size=1)
    for layer in (sp.SparseConv3d(4, 4, 5), sp.SparseMaxPool3d(5)):
        for kind in (RuntimeError, ValueError, GeometryError):
            with pytest.raises(kind, match=r"grid of \[3, 3, 3\]"):
                layer(x)


# residuals

RESIDUALS = {
    "submanifold": lambda sp, **k: sp.SubMConv3d(4, 6, 3, **k),
    "strided": lambda sp, **k: sp.SparseConv3d(4, 6, 3, 2, 1, **k),
    "transposed": lambda sp, **k: sp.SparseConvTranspose3d(4, 6, 2, 2, **k),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layer", RESIDUALS)
def test_float_layers_add_a_residual(sp, layer, training):
    """In inference, too, where spconv-triton refuses it unless `ConvAlgo.Native` is set."""
    x = apis.tensor(sp)
    made = RESIDUALS[layer](sp).train(training)
    plain = made(x)
    more = plain.replace_feature(torch.randn_like(plain.features).requires_grad_())
    y = made(x, add_input=more)
    torch.testing.assert_close(y.features, plain.features + more.features)
    y.features.sum().backward()
    assert torch.equal(more.features.grad, torch.ones_like(more.features))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layer", RESIDUALS)
def test_residuals_are_those_of_spconv(layer, training):
    def added(sp):
        torch.manual_seed(0)
        made = RESIDUALS[layer](sp, bias=False, algo=sp.ConvAlgo.Native).train(training)
        x = apis.tensor(sp)
        plain = made(x)
        number = torch.arange(plain.features.numel()).reshape(plain.features.shape)
        return apis.by_site(plain), apis.by_site(made(x, plain.replace_feature(number.float())))

    for plain, sums in both(added):
        changes = torch.stack([sums[site] - row for site, row in plain.items()])
        want = torch.arange(changes.numel()).reshape(changes.shape).float()
        torch.testing.assert_close(changes, want)


@pytest.mark.parametrize("wrong", ["a tensor", "other channels", "other rows"])
def test_residuals_that_do_not_fit_are_errors_as_in_spconv(wrong):
    def kind_of_error(sp):
        x = apis.tensor(sp)
        layer = sp.SubMConv3d(4, 6, 3, bias=False, algo=sp.ConvAlgo.Native)
        add = {
            "a tensor": torch.ones(60, 6),
            "other channels": x.replace_feature(torch.ones(60, 5)),
            "other rows": apis.tensor(sp, channels=6, rows=50),
        }[wrong]
        with pytest.raises((AttributeError, RuntimeError)) as found:
            layer(x, add)
        return isinstance(found.value, AttributeError)

    real, ours = both(kind_of_error)
    assert real == ours
