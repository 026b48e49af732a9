"""`sparse_bridge.profile`: through every framework, with the numbers that the model has without."""

from __future__ import annotations

import copy
import gc
import importlib
import json
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sparse_bridge
from sparse_bridge.adapters import call_stats
from sparse_bridge.errors import DataTypeError, LifecycleError
from sparse_bridge.tools.profiling.recorder import ModelProfile
from tests.adapters.spconv import apis

EXTENT = 12


@pytest.fixture(autouse=True)
def _plain(plain_settings):
    """No setting of the caller's."""


@pytest.fixture(autouse=True)
def clean():
    yield
    sparse_bridge.disable()
    call_stats.reset()


def coords(rows=300):
    generator = torch.Generator().manual_seed(0)
    sites = torch.randperm(EXTENT**3, generator=generator)[:rows]
    cells = torch.stack(torch.unravel_index(sites, (1, EXTENT, EXTENT, EXTENT)), 1)
    return cells.int().contiguous()


def spconv_case(sp):
    model = sp.SparseSequential(
        sp.SubMConv3d(4, 8, 3, bias=False, indice_key="a"),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        sp.SparseConv3d(8, 16, 3, 2, padding=1, bias=False, indice_key="b"),
        sp.SparseInverseConv3d(16, 4, 3, indice_key="b"),
    )
    shape = [EXTENT] * 3
    kinds = {
        "0": ("spconv", "submanifold", (3, 3, 3), 27),
        "1": ("torch", "BatchNorm1d", None, None),
        "2": ("torch", "ReLU", None, None),
        "3": ("spconv", "strided", (3, 3, 3), 27),
        "4": ("spconv", "inverse", (3, 3, 3), 27),
    }

    def run(model, features):
        return model(sp.SparseConvTensor(features, coords(), shape, 1)).features

    return model, run, kinds


def standin_case():
    sparse_bridge.enable("spconv", mode="standin")
    return spconv_case(importlib.import_module("spconv.pytorch"))


def patched_case():
    sp = apis.wheel()
    sparse_bridge.enable("spconv", mode="patch")
    return spconv_case(sp)


def torchsparse_case():
    sparse_bridge.enable("torchsparse")
    layers, tensors = (importlib.import_module(n) for n in ("torchsparse.nn", "torchsparse"))
    model = nn.Sequential(
        layers.Conv3d(4, 8, 3),
        layers.BatchNorm(8),
        layers.ReLU(True),
        layers.Conv3d(8, 16, 2, 2),
        layers.Conv3d(16, 4, 2, 2, transposed=True),
    )
    kinds = {
        "0": ("torchsparse", "submanifold", (3, 3, 3), 27),
        "1": ("torchsparse", "BatchNorm", None, None),
        "2": ("torchsparse", "ReLU", None, None),
        "3": ("torchsparse", "strided", (2, 2, 2), 8),
        "4": ("torchsparse", "transposed", (2, 2, 2), 8),
    }
    return model, lambda model, x: model(tensors.SparseTensor(x, coords())).feats, kinds


def minkowski_case():
    sparse_bridge.enable("minkowski")
    me = importlib.import_module("MinkowskiEngine")
    model = nn.Sequential(
        me.MinkowskiConvolution(4, 8, kernel_size=3, dimension=3),
        me.MinkowskiBatchNorm(8),
        me.MinkowskiReLU(),
        me.MinkowskiMaxPooling(2, 2, dimension=3),
        me.MinkowskiGenerativeConvolutionTranspose(8, 4, kernel_size=2, stride=2, dimension=3),
        me.MinkowskiConvolution(4, 4, kernel_size=1, dimension=3),
    )
    kinds = {
        "0": ("minkowski", "submanifold", (3, 3, 3), 27),
        "1": ("minkowski", "MinkowskiBatchNorm", None, None),
        "2": ("minkowski", "MinkowskiReLU", None, None),
        "3": ("minkowski", "pool", (2, 2, 2), None),
        "4": ("minkowski", "generative", (2, 2, 2), 8),
        "5": ("minkowski", "pointwise", (1, 1, 1), 1),
    }
    return model, lambda model, x: model(me.SparseTensor(x, coordinates=coords())).F, kinds


class Function(nn.Module):
    """FlexGEMM has functions only; projects wrap them so."""

    def __init__(self, c_in, c_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(c_out, 3, 3, 3, c_in) / 10)
        self.act = nn.ReLU()

    def forward(self, x):
        ops = importlib.import_module("flex_gemm.ops.spconv")
        shape = torch.Size([1, x.shape[1], EXTENT, EXTENT, EXTENT])
        y, _ = ops.sparse_submanifold_conv3d(x, coords(), shape, self.weight, None)
        return self.act(y)


def flex_gemm_case():
    sparse_bridge.enable("flex_gemm")
    kind = "neighbor_cache, sparse_submanifold_conv3d"
    kinds = {
        "0": ("flex_gemm", kind, None, 27),
        "0.act": ("torch", "ReLU", None, None),
        "1": ("flex_gemm", kind, None, 27),
        "1.act": ("torch", "ReLU", None, None),
    }
    return nn.Sequential(Function(4, 8), Function(8, 4)), lambda model, x: model(x), kinds


CASES = {
    "spconv-standin": standin_case,
    "spconv-patch": patched_case,
    "torchsparse": torchsparse_case,
    "minkowski": minkowski_case,
    "flex_gemm": flex_gemm_case,
}


@pytest.fixture(params=list(CASES))
def case(request, one_thread):
    torch.manual_seed(0)
    if request.param == "spconv-standin":
        with apis.standin():
            yield standin_case()
    else:
        yield CASES[request.param]()


def test_layers_of_flex_gemm_2():
    with sparse_bridge.enable("flex_gemm", mode="standin", profile="2.0"):
        layers = importlib.import_module("flex_gemm.nn")
        same, down = layers.SubmanifoldConv3d(4, 8, 3), layers.SparseConv3d(8, 8, 2, 2)
        pool, up = layers.SparsePool3d(2), layers.SparseConvTranspose3d(8, 4, 2, 2)
        model = nn.ModuleDict({"same": same, "down": down, "pool": pool, "up": up})
        shape = (1, EXTENT, EXTENT, EXTENT, 4)
        with sparse_bridge.profile(model) as p:
            x, _ = same(torch.randn(300, 4), coords(), shape)
            shape = (*shape[:-1], 8)
            pool(x, coords(), shape)
            y, coarse, small, _ = down(x, coords(), shape)
            up(y, coarse, small)
    kinds = {one.name: (one.kind, one.kernel) for one in p.layers}
    two = (2, 2, 2)
    assert kinds == {
        "same": ("submanifold", (3, 3, 3)),
        "down": ("strided", two),
        "pool": ("pool", two),
        "up": ("transposed", two),
    }
    assert all(one.framework == "flex_gemm" and one.calls == 1 for one in p.layers)


def trained(model, run):
    """Output, gradients and running statistics of one step."""
    features = torch.randn(300, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    out = run(model, features)
    out.square().sum().backward()
    return [out.detach(), features.grad, *(p.grad for p in model.parameters()), *model.buffers()]


def test_every_layer_with_its_facts(case):
    model, run, kinds = case
    with sparse_bridge.profile(model) as p:
        trained(model, run)
    found = {one.name: (one.framework, one.kind, one.kernel, one.offsets) for one in p.layers}
    assert list(found) == list(kinds)
    for name, (framework, kind, kernel, offsets) in kinds.items():
        assert found[name][:3] == (framework, kind, kernel), name
        if offsets is not None:
            assert found[name][3] == offsets, name
    first, last = p.layers[0], p.layers[-1]
    assert (first.rows_in, first.rows_out) == (300, 300)
    assert (first.channels_in, first.channels_out, last.channels_out) == (4, 8, 4)
    assert first.dataflow == "per_offset" and first.bridged >= 1 and not first.original
    assert first.output_bytes == 300 * 8 * 4 and first.peak_bytes is None


def test_times_add_up(case):
    model, run, _ = case
    with sparse_bridge.profile(model) as p:
        trained(model, run)
        run(model, torch.randn(300, 4))
    assert all(one.calls == len(one.host_ms) == 2 and one.median_ms > 0 for one in p.layers)
    assert all(one.backward_nodes and one.backward_host_ms > 0 for one in p.layers)
    assert not any(one.device_ms for one in p.layers)
    totals = p.totals
    inside = sum(sum(one.host_ms) for one in p.layers)
    assert totals.calls == 2 and totals.device_ms is None
    assert inside + totals.between_ms == pytest.approx(totals.host_ms)
    shares = [one["share"] for one in p.to_dict()["layers"]]
    assert sum(shares) + totals.between_ms / totals.ms == pytest.approx(1)


def test_nothing_changes(case):
    model, run, _ = case
    other = copy.deepcopy(model)
    plain = trained(other, run)
    with sparse_bridge.profile(model):
        seen = trained(model, run)
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert call_stats._listeners == []
    model.eval(), other.eval()
    with torch.no_grad(), sparse_bridge.profile(model):
        seen = run(model, torch.ones(300, 4))
    with torch.no_grad():
        torch.testing.assert_close(seen, run(other, torch.ones(300, 4)), rtol=1e-4, atol=1e-5)


def test_a_program_without_a_model(case):
    model, run, kinds = case
    with torch.no_grad(), sparse_bridge.profile() as p:
        run(model, torch.randn(300, 4))
    root = type(model).__name__
    assert [one.name for one in p.layers] == [f"{root}.{name}" for name in kinds]
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks


def test_two_models_of_one_class_have_two_names():
    a, b = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
    with sparse_bridge.profile() as p:
        b(a(torch.ones(1, 4)))
        nn.Linear(4, 2)(torch.ones(3, 4))
    assert [one.name for one in p.layers] == ["Sequential.0", "Sequential#2.0", "Linear"]
    assert p.totals.calls == 3


class Stumbles(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.fails = nn.Linear(4, 4), True

    def forward(self, x):
        x = self.inner(x)
        if self.fails:
            raise ZeroDivisionError
        return x


def test_exceptions_leave_no_hook_and_no_open_call():
    model = nn.Sequential(nn.Linear(4, 4), Stumbles(), nn.Linear(4, 4))
    with sparse_bridge.profile(model) as p:
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(1, 4))
        model[1].fails = False
        model(torch.ones(1, 4))
    assert {one.name: one.calls for one in p.layers} == {"0": 2, "1.inner": 2, "2": 1}
    with pytest.raises(ZeroDivisionError), sparse_bridge.profile(model):
        raise ZeroDivisionError
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_interrupted_calls_are_forgotten():
    model = nn.Sequential(nn.Linear(4, 4))
    with sparse_bridge.profile(model) as p:
        removed = model[0].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(1, 4))
        removed.remove()
        model(torch.ones(1, 4))
    assert [(one.name, one.calls) for one in p.layers] == [("0", 1)]
    assert p.totals.calls == 1


def interrupt(*_):
    raise KeyboardInterrupt


def test_a_graph_that_outlives_the_block_is_not_timed_and_not_kept():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    features = torch.ones(1, 4)
    with sparse_bridge.profile(model) as p:
        out = model(features)
    out.sum().backward()
    assert all(one.backward_nodes == 0 for one in p.layers)
    alive = weakref.ref(model)
    del model, out
    gc.collect()
    assert alive() is None and len(p.layers) == 2, "a profile keeps no model"


def test_other_threads_are_not_counted():
    model = nn.Linear(4, 4)
    with sparse_bridge.profile(model) as p:
        thread = threading.Thread(target=model, args=(torch.ones(1, 4),))
        thread.start()
        thread.join()
    assert p.layers == () and p.totals.calls == 0


def test_it_goes_on_counting():
    model = nn.Sequential(nn.Linear(4, 4))
    p = sparse_bridge.profile(model).start()
    model(torch.ones(1, 4))
    p.stop()
    model(torch.ones(1, 4))
    with p:
        model(torch.ones(1, 4))
    assert [one.calls for one in p.layers] == [2]


class Left(nn.Module):
    """A layer that is left to its framework."""

    def forward(self, x):
        call_stats.note("fake", "Conv", "groups=2")
        return x


def test_what_the_original_ran_is_said():
    model = nn.Sequential(Left(), Left())
    with sparse_bridge.profile(model) as p:
        model(torch.ones(5, 4))
    layer = p.layers[0]
    assert (layer.framework, layer.kind, layer.dataflow) == ("fake", "Conv", "original")
    assert layer.original == {"groups=2": 1} and layer.bridged == 0
    assert "2 calls were left to the original framework" in " ".join(str(p).split())


def test_text_html_and_json(tmp_path, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    p = sparse_bridge.profile(model)
    assert "profile of Sequential, not started: use it as `with" in repr(p) and str(p) == repr(p)
    assert p._repr_html_() is None
    with p:
        assert "running" in repr(p)
        model(torch.ones(5, 4))
    text = str(p)
    assert repr(p) == text and "2 layers" in text
    with sparse_bridge.profile(model[0]) as alone:
        model[0](torch.ones(5, 4))
    assert "\n1 layer. Times" in str(alone)
    assert "Profile of Sequential" in text and "between layers" in text and "4 > 8" in text
    monkeypatch.setenv("COLUMNS", "60")
    narrow = str(p)
    assert max(map(len, narrow.splitlines())) <= 60 and "\u2026" not in narrow
    assert "host ms" in narrow and "share" in narrow and "framework" not in narrow
    page = p._repr_html_()
    assert page.count("<tr>") == 1 + 2 + 2 and "4 &gt; 8" in page
    path = tmp_path / "p.json"
    assert json.loads(p.to_json(path)) == json.loads(path.read_text())
    assert json.loads(p.to_json())["layers"][0]["channels_out"] == 8


def test_wrong_use():
    with pytest.raises(DataTypeError, match=r"got str; expected a torch\.nn\.Module"):
        sparse_bridge.profile("model")
    with pytest.raises(DataTypeError, match="got int; expected"):
        sparse_bridge.report(3)
    p = sparse_bridge.profile(nn.Linear(2, 2))
    with pytest.raises(LifecycleError, match="has not ended"):
        _ = p.layers
    with p, pytest.raises(LifecycleError, match="runs already"):
        p.start()
    p.stop()


def test_a_report_knows_the_layers_of_a_model(case):
    model, run, kinds = case
    with sparse_bridge.profile(model):
        run(model, torch.randn(300, 4))
    modules = sparse_bridge.report(model).modules
    sparse = {name: kind for name, (framework, kind, *_) in kinds.items() if framework != "torch"}
    assert {one.name: one.kind for one in modules} == sparse
    assert all(one.calls == 1 and one.ms > 0 for one in modules)
    text, page = str(sparse_bridge.report(model)), sparse_bridge.report(model)._repr_html_()
    assert "Layers of the model" in text and "Layers of the model" in page
    assert sparse_bridge.report().modules == ()


def test_a_report_of_a_model_that_was_not_measured():
    with apis.standin() as sp:
        model = nn.Sequential(sp.SubMConv3d(4, 8, 3), nn.ReLU())
        (only,) = sparse_bridge.report(model).modules
    assert (only.name, only.framework, only.kind) == ("0", "spconv", "submanifold")
    assert only.parameter_bytes == (27 * 4 * 8 + 8) * 4 and only.ms is None
    report = sparse_bridge.adapters.call_stats.Report((), {}, modules=(only,))
    assert "Not measured" in str(report)
    assert json.loads(report.to_json())["modules"][0]["name"] == "0"


@pytest.mark.gpu
def test_times_and_memory_of_a_gpu():
    with apis.standin() as sp:
        model = sp.SparseSequential(
            sp.SubMConv3d(4, 32, 3, indice_key="a"),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            sp.SubMConv3d(32, 32, 3, indice_key="a"),
        ).cuda()
        features = torch.randn(300, 4, device="cuda")
        sites = coords().cuda()

        def run():
            x = sp.SparseConvTensor(features, sites, [EXTENT] * 3, 1)
            model(x).features.square().sum().backward()

        run()
        with sparse_bridge.profile(model) as p:
            run()
    assert all(len(one.device_ms) == 1 and one.device_ms[0] > 0 for one in p.layers)
    assert all(one.backward_device_ms > 0 for one in p.layers)
    assert all(one.peak_bytes >= one.output_bytes for one in p.layers if one.kind != "ReLU")
    assert p.totals.device_ms >= sum(sum(one.device_ms) for one in p.layers) * 0.99
    assert p.totals.peak_bytes >= max(one.peak_bytes for one in p.layers)


def test_a_model_that_is_gone():
    with sparse_bridge.profile(nn.Linear(2, 2)) as p:
        pass
    gc.collect()
    with pytest.raises(LifecycleError, match="model of this profile is gone"):
        p.start()


def test_profiles_within_profiles():
    model = nn.Sequential(nn.Linear(4, 4))
    with sparse_bridge.profile() as outer, sparse_bridge.profile(model) as inner:
        model(torch.ones(1, 4))
    assert [one.name for one in outer.layers] == ["Sequential.0"]
    assert [one.name for one in inner.layers] == ["0"]


def test_layers_that_a_checkpoint_runs_again_are_counted_again():
    layer = nn.Linear(4, 4)
    with sparse_bridge.profile(layer) as p:
        checkpoint(layer, torch.ones(1, 4), use_reentrant=False).sum().backward()
    assert [(one.calls, len(one.host_ms)) for one in p.layers] == [(2, 2)]


@pytest.mark.slow
@pytest.mark.filterwarnings("error::UserWarning")
def test_compiled_layers_are_not_seen_and_not_disturbed():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with sparse_bridge.profile(model) as p:
        out = compiled(torch.ones(1, 4))
    assert not any(one.name for one in p.layers)
    assert torch.equal(out, model(torch.ones(1, 4)))


def test_one_call_with_the_models_inputs():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    p = sparse_bridge.profile(model, torch.ones(5, 4))
    assert [(one.name, one.calls) for one in p.layers] == [("0", 1), ("1", 1)]
    assert "Profile of Sequential" in repr(p) and not model._forward_hooks
    with pytest.raises(DataTypeError, match="no model"):
        sparse_bridge.profile(None, torch.ones(5, 4))


def test_a_profile_that_ends_by_itself():
    """After so many calls, with the gradients of the last one."""
    model = nn.Linear(4, 2)
    p = ModelProfile(model, calls=2).start()
    for _ in range(5):
        model(torch.ones(3, 4)).sum().backward()
    assert not model._forward_hooks and p.totals.calls == 2
    (layer,) = p.layers
    assert layer.calls == 2 and layer.backward_nodes > 0 and layer.backward_nodes % 2 == 0
    p.stop()
    assert p.totals.calls == 2
