"""Who overrides a step of a framework's layer is obeyed: in a subclass, on an object, on the class."""

from __future__ import annotations

import contextlib
import inspect
import sys

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge.adapters.spconv.patch import patches
from sparse_bridge.adapters.steps import Steps
from sparse_bridge.errors import UnsupportedError

from .flex_gemm import installed
from .flex_gemm.test_convolutions import voxels, weights
from .minkowski.scenes import scene
from .spconv import apis
from .torchsparse import real

WAYS = "subclass", "object", "class"


class Spy:
    """Puts a wrapper around a method, in one of the ways, and counts its calls."""

    def __init__(self, way, owner, name):
        self.way, self.owner, self.name, self.calls = way, owner, name, 0

    def wrapper(self, function):
        def spied(*args, **kwargs):
            self.calls += 1
            return function(*args, **kwargs)

        return spied

    @contextlib.contextmanager
    def on(self, layer):
        if self.way == "subclass":
            plain = type(layer)
            layer.__class__ = type("Derived", (plain,), {self.name: self.wrapper(getattr(plain, self.name))})
            yield
            layer.__class__ = plain
        elif self.way == "object":
            setattr(layer, self.name, self.wrapper(getattr(layer, self.name)))
            yield
            delattr(layer, self.name)
        else:
            owner = next(base for base in self.owner.__mro__ if self.name in vars(base))
            original = vars(owner)[self.name]
            setattr(owner, self.name, self.wrapper(original))
            try:
                yield
            finally:
                setattr(owner, self.name, original)


@pytest.fixture(params=list(apis.APIS))
def sp(request):
    with apis.APIS[request.param]() as module:
        yield module


STEPS = {
    "SubMConv3d": ("forward", "_conv_forward", "_check_subm_reuse_valid"),
    "SparseConv3d": ("forward", "_conv_forward"),
    "SparseInverseConv3d": ("forward", "_conv_forward", "_check_inverse_reuse_valid"),
    "SparseMaxPool3d": ("forward",),
    "SparseAvgPool3d": ("forward",),
    "SparseGlobalMaxPool": ("forward",),
    "SparseGlobalAvgPool": ("forward",),
    "SparseSequential": ("forward",),
    "SparseBatchNorm": ("forward",),
    "SparseReLU": ("forward",),
    "ToDense": ("forward",),
}


def _layer(sp, name):
    """(a layer, what goes before it)."""
    if name == "SubMConv3d":
        return sp.SubMConv3d(4, 4, 3, indice_key="s"), [sp.SubMConv3d(4, 4, 3, indice_key="s")]
    if name == "SparseInverseConv3d":
        return sp.SparseInverseConv3d(4, 4, 3, indice_key="d"), [sp.SparseConv3d(4, 4, 3, 2, 1, indice_key="d")]
    if name == "SparseSequential":
        return sp.SparseSequential(sp.SubMConv3d(4, 4, 3), nn.BatchNorm1d(4)), []
    owner = getattr(sp, name, None) or getattr(sp.modules, name)
    arguments = {"SparseConv3d": (4, 4, 3, 2), "SparseBatchNorm": (4,)}.get(name, (2,) if "Pool3d" in name else ())
    return owner(*arguments), []


def test_the_table_names_what_is_patched():
    """Every class whose method a patch replaces, and every step that its original method has."""
    apis.wheel()
    with apis.patched() as sp:
        classes = {getattr(sp, name, None) or getattr(sp.modules, name): steps for name, steps in STEPS.items()}
        for patch in patches():
            if not (isinstance(patch.owner, type) and issubclass(patch.owner, nn.Module)) or patch.name == "__init__":
                continue
            known = {step for each, steps in classes.items() if issubclass(each, patch.owner) for step in steps}
            original = inspect.unwrap(vars(patch.owner).get(patch.name) or getattr(patch.owner, patch.name))
            steps = {name for name, _ in Steps(patch.owner, patch.name, original)._made}
            assert steps <= known, f"{patch.owner.__name__}: {steps - known}"
            if patch.name != "_load_weight_different_layout" and "Sync" not in patch.owner.__name__:
                assert known, patch.owner


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fused", (False, True))
@pytest.mark.parametrize(("name", "step"), [(name, step) for name, steps in STEPS.items() for step in steps])
def test_steps_of_spconv(sp, name, step, fused, way):
    """fused: in a container, in inference, with a norm behind it that the layer's product takes."""
    layer, before = _layer(sp, name)
    if fused and name not in ("SubMConv3d", "SparseConv3d", "SparseInverseConv3d"):
        pytest.skip("nothing is fused")
    spy = Spy(way, type(layer), step)
    tail = [nn.BatchNorm1d(4), nn.ReLU()] if fused else []
    model = sp.SparseSequential(*before, layer, *tail).train(not fused)
    x = apis.tensor(sp)
    with torch.set_grad_enabled(not fused):
        for _ in range(2):
            want = model(x)
        with spy.on(layer):
            for _ in range(2):
                got = model(x)
    assert spy.calls >= 2
    if isinstance(want, torch.Tensor):
        assert torch.equal(got, want)
    elif name != "SparseBatchNorm":
        torch.testing.assert_close(got.features, want.features)


def test_a_check_that_lets_more_pass(sp):
    class Relaxed(sp.SubMConv3d):
        def _check_subm_reuse_valid(self, inp, spatial_shape, datas):
            pass

    x = sp.SubMConv3d(4, 4, 3, indice_key="s")(apis.tensor(sp))
    x.spatial_shape = [n + 1 for n in x.spatial_shape]
    with pytest.raises(ValueError, match="grid"):
        sp.SubMConv3d(4, 4, 3, indice_key="s")(x)
    assert Relaxed(4, 4, 3, indice_key="s")(x).features.shape == x.features.shape


@pytest.mark.parametrize("framework", ("spconv", "torchsparse"))
@pytest.mark.parametrize("way", ("subclass", "every module"))
def test_calls_of_a_fused_layer(monkeypatch, framework, way):
    """Who overrides `__call__` sees it called, in a container that fuses."""
    with _standin(framework) as (module, tensor, _):
        layer = (module.SubMConv3d if framework == "spconv" else module.Conv3d)(4, 4, 3)
        norm = nn.BatchNorm1d(4) if framework == "spconv" else module.BatchNorm(4)
        model = getattr(module, "SparseSequential", nn.Sequential)(layer, norm).eval()
        seen = []

        def call(self, *args):
            seen.append(self)
            return plain(self, *args)

        plain = nn.Module.__call__
        with torch.no_grad():
            model(tensor())
            if way == "subclass":
                layer.__class__ = type("Derived", (type(layer),), {"__call__": call})
            else:
                monkeypatch.setattr(nn.Module, "__call__", call)
            model(tensor())
            monkeypatch.undo()
        assert layer in seen


@pytest.mark.parametrize("part", ("forward", "backward", "_sparse_submanifold_conv_forward", "apply"))
@pytest.mark.parametrize("way", ("subclass", "class"))
def test_parts_of_an_installed_flex_gemm(monkeypatch, part, way):
    real_package = installed.first(monkeypatch)
    spconv = real_package.ops.spconv
    feats, coords, shape = voxels(30, 3)
    weight = weights(3, 4, (3, 3, 3))
    seen = []

    def mine(*args):
        seen.append(part)
        return feats.new_zeros(()) if part == "forward" else None

    with sparse_bridge.enable("flex_gemm", mode="patch") as handle:
        function = spconv.SubMConv3dFunction
        spconv.sparse_submanifold_conv3d(feats, coords, shape, weight)
        if way == "subclass":
            function = type("Derived", (function,), {part: staticmethod(mine)})
        else:
            monkeypatch.setattr(function, part, staticmethod(mine))
        with contextlib.suppress(RuntimeError):  # what is left of the original has no kernels here
            if way == "class":
                spconv.sparse_submanifold_conv3d(feats, coords, shape, weight)
            else:
                function.apply(feats, coords, shape, None, weight)
        if part in ("forward", "apply"):
            assert seen == [part]
        if part != "apply":
            assert f"{part} is overridden" in str(handle.report())
        monkeypatch.undo()


def test_parts_that_were_replaced_before(monkeypatch):
    spconv = installed.first(monkeypatch).ops.spconv
    feats, coords, shape = voxels(30, 3)
    seen = []
    spconv.SubMConv3dFunction._compute_neighbor_cache = mine = staticmethod(lambda *args: seen.append(args))
    mine.__func__.__module__ = "elsewhere"
    spconv.SubMConv3dFunction.forward = staticmethod(lambda ctx, *args: mine.__func__(*args) or feats)
    spconv.SubMConv3dFunction.forward.__module__ = "elsewhere"
    with sparse_bridge.enable("flex_gemm", mode="patch"):
        spconv.sparse_submanifold_conv3d(feats, coords, shape, weights(3, 4, (3, 3, 3)))
    assert len(seen) == 1


@pytest.mark.parametrize("name", ("_get_output_coords", "_compute_neighbor_cache"))
def test_parts_of_the_strided_layer(monkeypatch, name):
    sparse_bridge.disable()
    with sparse_bridge.enable("flex_gemm", mode="standin"):
        import flex_gemm

        function, seen = flex_gemm.ops.spconv.SparseConv3dFunction, []
        original = getattr(function, name)
        with monkeypatch.context() as patch:
            patch.setattr(function, name, staticmethod(lambda *args: seen.append(name) or original(*args)))
            feats, coords, shape = voxels(30, 3)
            flex_gemm.ops.spconv.sparse_conv3d(feats, coords, shape, weights(3, 4, (3, 3, 3)), stride=2)
    assert seen == [name]


@pytest.mark.parametrize("step", ("build_kernel_map", "spdownsample", "transpose_kernel_map"))
def test_the_standin_of_torchsparse_refuses_replaced_steps(monkeypatch, step):
    sparse_bridge.disable()
    with sparse_bridge.enable("torchsparse", mode="standin"):
        import torchsparse
        from torchsparse import nn as spnn

        coords = torch.tensor([[0, 0, 0, 0], [0, 1, 0, 0]]).int()
        model = nn.Sequential(spnn.Conv3d(3, 4, 3), spnn.BatchNorm(4)).eval()

        def run():
            return model(torchsparse.SparseTensor(torch.ones(2, 3), coords)).feats

        with torch.no_grad():
            want = [run(), run()][1]
            with monkeypatch.context() as patch:
                patch.setattr(spnn.functional, step, lambda *args, **kwargs: None)
                for _ in range(2):
                    with pytest.raises(UnsupportedError, match=f"{step} was replaced"):
                        run()
            assert torch.equal(run(), want)


ME_LAYERS = {
    "MinkowskiConvolution": ("conv", (4, 4, 3)),
    "MinkowskiConvolutionTranspose": ("conv", (4, 4, 3)),
    "MinkowskiGenerativeConvolutionTranspose": ("conv", (4, 4, 3)),
    "MinkowskiSumPooling": ("pooling", (3, 1)),
    "MinkowskiAvgPooling": ("pooling", (3, 1)),
    "MinkowskiMaxPooling": ("pooling", (3, 1)),
    "MinkowskiPoolingTranspose": ("pooling", (3, 1)),
    "MinkowskiGlobalAvgPooling": ("pooling", None),
    "MinkowskiGlobalMaxPooling": ("pooling", None),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ME_LAYERS)
def test_functions_of_minkowski_layers(monkeypatch, name, way):
    """Modules of MinkowskiEngine keep the autograd function that they apply, and programs exchange it."""
    with sparse_bridge.enable("minkowski"):
        import MinkowskiEngine as ME

        attribute, sizes = ME_LAYERS[name]
        coords, feats = scene(3, 4)
        x = ME.SparseTensor(feats.float(), coords)
        layer = getattr(ME, name)(*(sizes or ()), **({"dimension": 3} if sizes else {}))
        want = layer(x).F
        theirs = type(getattr(layer, attribute))
        apply = theirs.apply
        twice = classmethod(lambda cls, *args: 2 * apply(*args))
        if way == "class":
            owner = next(base for base in theirs.__mro__ if "apply" in vars(base))
            monkeypatch.setattr(owner, "apply", twice)
        else:
            mine = type("Mine", (theirs,), {"apply": twice})()
            if way == "subclass":
                layer.__class__ = type("Derived", (type(layer),), {attribute: mine})
            else:
                setattr(layer, attribute, mine)
        torch.testing.assert_close(layer(x).F, 2 * want)
        monkeypatch.undo()


def test_a_minkowski_function_with_passes_of_its_own():
    with sparse_bridge.enable("minkowski"):
        import MinkowskiEngine as ME

        class Straight(ME.MinkowskiConvolutionFunction):
            @staticmethod
            def forward(ctx, features, kernel, generator, mode, in_key, out_key, manager):
                ctx.save_for_backward(features, kernel)
                out_key.set_key(*in_key.key)
                return features @ kernel[0]

            @staticmethod
            def backward(ctx, grad):
                _, kernel = ctx.saved_tensors
                return 3 * grad @ kernel[0].t(), *[None] * 6

        coords, feats = scene(3, 4)
        x = ME.SparseTensor(feats.float().requires_grad_(), coords)
        layer = ME.MinkowskiConvolution(4, 4, 3, dimension=3)
        layer.conv = Straight()
        y = layer(x).F
        torch.testing.assert_close(y, x.F @ layer.kernel[0])
        (got,) = torch.autograd.grad(y.sum(), x.F)
        torch.testing.assert_close(got, 3 * torch.ones_like(y) @ layer.kernel[0].t())


def test_functions_that_torchsparse_goes_through(tmp_path, monkeypatch):
    """The original convolution by way of a function that somebody has replaced."""
    sparse_bridge.disable()
    monkeypatch.setitem(
        real.FILES,
        "nn/functional/conv.py",
        """
        from torchsparse.nn import functional as F

        def build_kernel_map(*args):
            return "made"

        def conv3d(input, weight, kernel_size, *args, **kwargs):
            return "original", F.build_kernel_map()
        """,
    )
    monkeypatch.setitem(
        real.FILES,
        "nn/functional/__init__.py",
        real.FILES["nn/functional/__init__.py"].replace("import conv3d", "import build_kernel_map, conv3d"),
    )
    real.write(tmp_path, "2.1.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchsparse"]:
        monkeypatch.delitem(sys.modules, name)
    import torchsparse

    coords = torch.tensor([[0, 0, 0, 0], [0, 1, 0, 0]]).int()
    x = torchsparse.SparseTensor(torch.randn(2, 3), coords)
    with sparse_bridge.enable("torchsparse", mode="patch") as handle:
        functional = torchsparse.nn.functional
        weight = torch.randn(27, 3, 3)
        assert functional.conv3d(x, weight, 3).F.shape == (2, 3)
        functional.build_kernel_map = lambda: "mine"
        assert functional.conv3d(x, weight, 3) == ("original", "mine")
        assert "build_kernel_map is replaced" in str(handle.report())
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchsparse"]:
        del sys.modules[name]


def _scaled(name):
    """What puts a property over a parameter: three times as much."""
    return {name: property(lambda self: 3 * self._parameters[name])}


@contextlib.contextmanager
def _standin(framework):
    """(the module with its layers, a function that gives a sparse tensor, its features' name)."""
    sparse_bridge.disable()
    if framework == "spconv":
        with apis.standin() as sp:
            yield sp, lambda: apis.tensor(sp), "features"
        return
    with sparse_bridge.enable(framework, mode="standin"):
        yield _names_of(framework)


def _names_of(framework):
    coords, feats = scene(3, 4)
    if framework == "minkowski":
        import MinkowskiEngine as ME

        return ME, lambda: ME.SparseTensor(feats.float(), coords), "F"
    import torchsparse

    return torchsparse.nn, lambda: torchsparse.SparseTensor(feats.float(), coords), "feats"


@pytest.mark.parametrize("with_bias", (False, True))
@pytest.mark.parametrize("fused", (False, True))
@pytest.mark.parametrize(
    ("framework", "name", "weight"),
    [
        ("spconv", "SubMConv3d", "weight"),
        ("minkowski", "MinkowskiConvolution", "kernel"),
        ("torchsparse", "Conv3d", "kernel"),
    ],
)
def test_properties_over_parameters(framework, name, weight, fused, with_bias):
    with _standin(framework) as (module, tensor, features):
        options = {"dimension": 3} if framework == "minkowski" else {}
        layer = getattr(module, name)(4, 4, 3, bias=True, **options)
        norm = {"spconv": nn.BatchNorm1d, "minkowski": getattr(module, "MinkowskiBatchNorm", None)}.get(framework)
        sequential = getattr(module, "SparseSequential", nn.Sequential)
        layers = [layer, (norm or module.BatchNorm)(4)] if fused else [layer]
        model = sequential(*layers).train(not fused)
        scaled = "bias" if with_bias else weight
        with torch.no_grad():
            plain = getattr(model(tensor()), features)
            getattr(layer, scaled).mul_(3)
            want = getattr(model(tensor()), features)
            getattr(layer, scaled).div_(3)
            layer.__class__ = type("Scaled", (type(layer),), _scaled(scaled))
            got = [getattr(model(tensor()), features) for _ in range(3)][-1]
        assert not torch.allclose(plain, want)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("training", (False, True))
def test_a_property_over_a_parameter_of_a_norm(training):
    sparse_bridge.disable()
    with sparse_bridge.enable("torchsparse", mode="standin"):
        import torchsparse

        norm = torchsparse.nn.BatchNorm(4).train(training)
        norm.__class__ = type("Scaled", (type(norm),), _scaled("weight"))
        coords, feats = scene(3, 4)
        y = norm(torchsparse.SparseTensor(feats.float(), coords)).feats
        want = nn.BatchNorm1d(4).train(training)(feats.float())
        torch.testing.assert_close(y, 3 * want)
