"""`torch.compile` of whole programs gives the eager numbers, in one graph, with any rows."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import sparse_bridge.compile
from sparse_bridge.adapters.minkowski.maps import MapRegistry
from sparse_bridge.core.compile import norms
from tests.compile.comparison import assert_near, assert_same, compare
from tests.compile.programs import APIS, DEVICES, GRID, NETWORKS, PROGRAMS, WHERE, scene
from tests.quick import quick
from tests.releases import WHOLE_GRAPHS

pytestmark = WHOLE_GRAPHS


@pytest.mark.sample(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("api", quick(["spconv", "torchsparse", "minkowski"], APIS))
def test_three_layers_in_one_graph(api, device, plain_settings):
    with PROGRAMS[api]() as programs:
        compare(programs["three"]().train(), "aot_eager", 3, device=device)


@pytest.mark.sample(0)
@pytest.mark.parametrize(
    ("device", "backend", "dtype"),
    [("cpu", "aot_eager", torch.bfloat16)]
    + [
        pytest.param("cuda", backend, dtype, marks=pytest.mark.gpu)
        for backend in ("aot_eager", "inductor")
        for dtype in (torch.float16, torch.bfloat16)
    ],
)
@pytest.mark.parametrize("api", quick(["spconv", "torchsparse"], APIS))
def test_autocast(api, device, backend, dtype, plain_settings):
    with PROGRAMS[api]() as programs:
        compare(programs["three"]().train(), backend, 3, device=device, autocast=dtype)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("api", quick(["spconv"], ("spconv", "torchsparse", "minkowski")))
def test_norms_as_operators(api, plain_settings, rules):
    """As they are on GPUs."""
    rules.set(norms, DEVICES=("cpu",))
    with PROGRAMS[api]() as programs:
        compare(programs["three"]().train(), "aot_eager", 2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("api", quick(["spconv", "torchsparse", "minkowski"], APIS))
def test_inference_of_three_layers_in_one_graph(api, plain_settings):
    with PROGRAMS[api]() as programs, torch.no_grad():
        compare(programs["three"]().eval(), "eager", 3)


@pytest.mark.slow
@pytest.mark.parametrize("api", ("spconv",))
def test_pools_and_inverse_layers_in_one_graph(api, plain_settings):
    with PROGRAMS[api]() as programs:
        compare(programs["pools"]().train(), "aot_eager", 3)


def test_what_a_layer_was_given_reaches_its_operator(plain_settings):
    """Leave to add up in fp16, and a dataflow of the module's own."""
    seen = []

    def backend(graph, inputs):
        calls = [node for node in graph.graph.nodes if "sparse_bridge.conv" in str(node.target)]
        seen.extend(call.args[7:9] for call in calls)
        return graph.forward

    with PROGRAMS["spconv"]():
        import spconv.pytorch as spconv

        layers = (spconv.SubMConv3d(4, 4, 3, fp32_accum=False), spconv.SubMConv3d(4, 4, 3), spconv.SubMConv3d(4, 4, 3))
        network = nn.Sequential(*layers).half()
        sparse_bridge.dataflow(network[1], "explicit")
        features, coords = scene(0)
        torch._dynamo.reset()

        def run(module):
            x = spconv.SparseConvTensor(features.half(), coords, list(GRID), 2)
            return module(x).features

        y = torch.compile(run, backend=backend, fullgraph=True)(network)
        torch.testing.assert_close(y, run(network), rtol=1e-2, atol=1e-2)
    assert seen == [("half", ""), ("ieee", "explicit"), ("ieee", "")]


@pytest.mark.sample(1)
@pytest.mark.parametrize("api", ("torchsparse", "torchsparse 1.4"))
def test_points_of_torchsparse_in_one_graph(api, plain_settings):
    with PROGRAMS[api]() as programs:
        compare(programs["points"]().train(), "aot_eager", 3)


@pytest.mark.slow
def test_layers_outside_of_graphs_see_what_graphs_made(plain_settings):
    """A layer onto coordinates that a tensor holds runs between two graphs."""
    with PROGRAMS["minkowski"]() as programs:
        import MinkowskiEngine as ME

        program = programs["three"]()
        last = ME.MinkowskiConvolution(6, 5, kernel_size=3, dimension=3)

        class Outside(nn.Module):
            def __init__(self):
                super().__init__()
                self.network, self.last = program.network, last

            def forward(self, features, coords):
                x = self.network(program._wrap(features, coords))
                return self.last(x, x.C[::2]).F

        compare(Outside().train(), "aot_eager", 3, fullgraph=False)


@pytest.mark.sample(1)
@pytest.mark.parametrize("network", quick(["pools"], ("pools", "gate", "joins", "points")))
def test_layers_of_minkowski_in_one_graph(network, plain_settings):
    with PROGRAMS["minkowski"]() as programs:
        compare(programs[network]().train(), "aot_eager", 3)


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
@pytest.mark.parametrize("training", (False, True), ids=("eval", "train"))
@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize(("api", "network"), NETWORKS)
def test_networks_in_one_graph(api, network, device, training, backend, plain_settings):
    with PROGRAMS[api]() as programs, torch.set_grad_enabled(training):
        compare(programs[network]().train(training), backend, 10, device=device)


@pytest.mark.gpu
@pytest.mark.parametrize("training", (False, True), ids=("eval", "train"))
@pytest.mark.parametrize("api", APIS)
def test_three_layers_on_a_gpu(api, training, plain_settings):
    with PROGRAMS[api]() as programs, torch.set_grad_enabled(training):
        compare(programs["three"]().train(training), "inductor", 3, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("network", ("pools", "gate", "joins", "points"))
def test_layers_of_minkowski_on_a_gpu(network, plain_settings):
    with PROGRAMS["minkowski"]() as programs:
        compare(programs[network]().train(), "inductor", 3, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("api", ("torchsparse", "torchsparse 1.4"))
def test_points_of_torchsparse_on_a_gpu(api, plain_settings):
    with PROGRAMS[api]() as programs:
        compare(programs["points"]().train(), "inductor", 3, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("api", APIS)
def test_networks_in_half_precision(api, plain_settings):
    """Their layers of kernel volume 1 take another kernel outside of graphs."""
    with PROGRAMS[api]() as programs, torch.no_grad():
        program = programs["unet"]().eval().cuda()
        compiled = torch.compile(program, fullgraph=True)
        exact = [program(*(one.cuda() for one in scene(number))) for number in range(3)]
        program.half()
        for number in range(3):
            features, coords = (one.cuda() for one in scene(number))
            assert_near(compiled(features.half(), coords).float(), exact[number], 0.05)


@pytest.mark.sample(0)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("api", quick(["spconv", "minkowski"], APIS))
def test_sparse_tensors_made_before_the_graph(api, device, plain_settings):
    with PROGRAMS[api]() as programs, torch.no_grad():
        program = programs["three"]().eval().to(device)
        torch._dynamo.reset()
        compiled = torch.compile(program.network, fullgraph=True, backend="aot_eager")
        for number in range(3):
            x = program._wrap(*(one.to(device) for one in scene(number)))
            expected = program(*(one.to(device) for one in scene(number)))
            assert_same(program._read(compiled(x)), expected)


@pytest.mark.slow
def test_a_manager_from_before_the_graph_is_used_in_it(plain_settings, monkeypatch):
    """Not another one, whose maps would be built beside those that were prepared for the first."""
    inserted, own = [], MapRegistry.insert

    def insert(self, *args, **kwargs):
        inserted.append(args)
        return own(self, *args, **kwargs)

    with PROGRAMS["minkowski"]() as programs, torch.no_grad():
        program = programs["three"]().eval()
        compiled = torch.compile(program.network, fullgraph=True, backend="aot_eager")
        monkeypatch.setattr(MapRegistry, "insert", insert)
        for number in range(4):
            x = program._wrap(*scene(number))
            before = len(inserted)
            y = compiled(x)
            assert len(inserted) == before == number + 1
            assert_same(program._read(y), program._read(program.network(x)))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("api", ("spconv", "torchsparse", "minkowski"))
def test_nothing_stays_of_a_scene_but_what_is_held(api, plain_settings):
    """No collector sees through the memory of handles, so that nothing may hold itself by them."""
    with PROGRAMS[api]() as programs, torch.no_grad():
        program = programs["three"]().eval()
        torch._dynamo.reset()
        compiled = torch.compile(program.network, backend="eager", fullgraph=True)

        def run(number):
            compiled(program._wrap(*scene(number)))

        for number in range(3):
            run(number)
        gc.collect()
        before = sparse_bridge.compile.live_handles()
        for number in range(3):
            run(number)
        gc.collect()
        assert sparse_bridge.compile.live_handles() <= before


@pytest.mark.slow
def test_eager_layers_go_on_with_what_a_graph_made(plain_settings):
    with PROGRAMS["spconv"](), torch.no_grad():
        import spconv.pytorch as sp

        torch.manual_seed(0)
        down = sp.SparseConv3d(4, 8, 3, stride=2, padding=1, indice_key="down").eval()
        inner = sp.SubMConv3d(8, 8, 3, indice_key="sub").eval()
        up = sp.SparseInverseConv3d(8, 4, 3, indice_key="down").eval()
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: inner(down(x)), backend="eager", fullgraph=True)
        for number in range(3):
            features, coords = scene(number)
            x = sp.SparseConvTensor(features, coords, list(GRID), 2)
            y = up(compiled(x))
            want = up(inner(down(sp.SparseConvTensor(features, coords, list(GRID), 2))))
            assert torch.equal(y.features, want.features)
            assert torch.equal(y.indices, want.indices)


def test_new_weights_and_settings_count(plain_settings):
    with PROGRAMS["spconv"]() as programs, torch.no_grad():
        program = programs["three"]().eval()
        twin = copy.deepcopy(program)
        torch._dynamo.reset()
        compiled = torch.compile(program, backend="eager", fullgraph=True)
        for change in (None, lambda p: p.mul_(1.5), lambda p: setattr(p, "data", p.data.clone())):
            for one in (program, twin):
                for parameter in one.parameters() if change else ():
                    change(parameter)
            for dataflow in ("auto", "per_offset"):
                with sparse_bridge.settings.override(dataflow=dataflow):
                    assert torch.equal(compiled(*scene(1)), twin(*scene(1)))


@pytest.mark.slow
def test_too_few_rows_are_refused(plain_settings):
    with PROGRAMS["spconv"]() as programs, torch.no_grad():
        program = programs["three"]().eval()
        torch._dynamo.reset()
        compiled = torch.compile(program, backend="eager", fullgraph=True)
        for number in range(2):
            compiled(*scene(number))
        features, coords = scene(0)
        with pytest.raises(sparse_bridge.errors.SparseBridgeError, match="rows"):
            compiled(features[:0], coords[:0])


def test_what_is_written_to_a_result_stays_out_of_the_next(plain_settings):
    with PROGRAMS["spconv"](), torch.no_grad():
        import spconv.pytorch as sp

        torch.manual_seed(0)
        layers = sp.SparseSequential(sp.SubMConv3d(4, 8, 3), sp.SparseConv3d(8, 8, 3, 2, 1), sp.SparseConv3d(8, 4, 1))

        def program(features, coords):
            y = layers(sp.SparseConvTensor(features, coords, list(GRID), 2))
            return y.features, y.indices

        torch._dynamo.reset()
        compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
        features, coords = scene(1)
        for _ in range(3):
            made = compiled(features, coords)
            want = program(features, coords.clone())
            assert all(map(torch.equal, made, want))
            made[1][:, 1:] += 5


@pytest.mark.slow
def test_gradients_under_a_memory_limit_are_refused(plain_settings):
    with PROGRAMS["spconv"]() as programs:
        program = programs["three"]().train()
        torch._dynamo.reset()
        compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
        compiled(*scene(1)).sum().backward()
        with sparse_bridge.memory_limit("1GiB"):
            y = compiled(*scene(1))
            with pytest.raises(sparse_bridge.errors.UnsupportedError, match="checkpoint"):
                y.sum().backward()
