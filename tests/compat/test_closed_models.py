"""Published models whose world is closed: what they read of Python is guarded, and they leave nothing behind."""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch

pytest.importorskip("sparse_bridge.core.capture")

from compat import matrix
from compat.subject import Subject
from sparse_bridge.adapters import protocol
from sparse_bridge.core.closed_world.audit import Audit
from sparse_bridge.refusals import Refusal
from sparse_bridge.tools.networks import minkowski, spconv
from sparse_bridge.tools.networks import torchsparse as for_torchsparse
from tests.clouds import cloud
from tests.compat.loading import models

MODELS = {model.name: model for model in matrix.load()}
CLOSED = {
    "spconv": ("second", "voxel_res", "part_a2", "voxelnext", "mmdet3d_encoder", "bevfusion", "centerpoint")
    + ("mmdet3d_unet", "cylinder3d", "gaussianformer", "neuralbody", "openoccupancy", "pillarnet", "sst"),
    "torchsparse": ("mmdet3d_minkunet", "spvnas_minkunet", "mmdet3d_spvcnn", "neuralrecon"),
    "minkowski": ("mmdet3d_minkunet", "pointcept_minkunet", "fcgf", "minkunet", "four_dmos", "dgr")
    + ("pointcontrast", "spine"),
}
QUICK = ("gaussianformer", "spvnas_minkunet", "fcgf", "minkunet")
CASES = [
    pytest.param(framework, name, marks=() if name in QUICK else pytest.mark.slow, id=f"{framework}-{name}")
    for framework, names in CLOSED.items()
    for name in names
]
# What they take to the host no graph could: their inner parts are tried then.
OPEN = [("spconv", "softgroup", False), ("minkowski", "completion", False), ("minkowski", "pcgc", True)]


class _Tensors:
    """All frameworks at once, as far as an audit asks."""

    def is_own(self, module):
        home = type(module).__module__
        return protocol.root_of(type(module)) is not None or home.startswith("torch.nn.")


@contextlib.contextmanager
def _model(framework, name):
    """(a published model as the matrix runs it, its network)."""
    model = next(m for m in MODELS.values() if m.framework == framework and m.module.endswith(f".{name}"))
    with models(framework, model.profile):
        subject = Subject(model, "cpu", model.dtypes[0], "tiny")
        yield subject, subject.network()


def _watched(subject, network):
    batch = subject.batch(subject.scene())
    with Audit(network, _Tensors()) as audit:
        network(*batch)
    return audit


@pytest.mark.parametrize(("framework", "name"), CASES)
def test_a_published_model_is_closed(framework, name):
    with _model(framework, name) as (subject, network):
        for train in (False, True):
            network.train(train)
            guards = _watched(subject, network).guards()
            assert guards.hold(), guards.changed()
            with torch.no_grad():
                subject.run(network)
            assert guards.hold(), guards.changed()
        network.eval()
        assert "training" in guards.changed()


def test_switches_that_models_set_are_over_with_them():
    """Rows of new coordinates would be sorted from then on, wherever the stand-in is met."""
    with models("spconv") as load:
        constants = sys.modules["spconv.constants"]
        load("pcdet_utils")
        assert not constants.SPCONV_USE_DIRECT_TABLE
    assert constants.SPCONV_USE_DIRECT_TABLE


@pytest.mark.parametrize(("framework", "name", "train"), OPEN)
def test_a_model_that_reads_tensors_is_open(framework, name, train):
    with _model(framework, name) as (subject, network), pytest.raises(Refusal, match="GRAPH_HOST_READ"):
        _watched(subject, network.train(train)).guards()


def test_a_model_that_chooses_by_rows_is_open():
    """FCAF3D keeps at most so many rows of an item, which none of its scenes need have; its backbone does not."""
    with _model("minkowski", "fcaf3d") as (subject, network), pytest.raises(Refusal, match="GRAPH_CHOOSES_BY_ROWS"):
        _watched(subject, network).guards()


@pytest.mark.parametrize(
    ("framework", "name", "uses"),
    [
        ("spconv", "lion", {"spatial_shape"}),  # rounded up for a coarser tensor
        ("spconv", "centerpoint", {"spatial_shape"}),  # for the view from above
        ("spconv", "sst", set()),
    ],
)
def test_what_a_model_uses_of_a_grid(framework, name, uses):
    with _model(framework, name) as (subject, network):
        assert _watched(subject, network).guards().grid_uses == uses


def _unet(framework):
    """The networks that examples and figures take, small, and an input."""
    coords = cloud((32, 32, 32), 2, 0.01)
    x, thin = torch.randn(len(coords), 4), {"encoder": (4, 6, 8), "decoder": (8, 6, 4), "stem": 4}
    if framework == "spconv":
        import spconv.pytorch as sp

        network = spconv.ResidualUNet(sp, classes=5, blocks=(1, 2, 1), **thin)
        return network, lambda: sp.SparseConvTensor(x, coords, [32, 32, 32], 2)
    if framework == "torchsparse":
        import torchsparse as ts
        import torchsparse.nn

        network = for_torchsparse.ResidualUNet(ts, classes=5, blocks=(1, 2, 1, 2, 2, 2), **thin)
        return network, lambda: ts.SparseTensor(x, coords)
    import MinkowskiEngine as ME

    planes = (4, 4, 6, 8, 8, 6, 4, 4)
    network = minkowski.MinkUNet(ME, 4, 5, layers=(1,) * 8, planes=planes, init=4)
    return network, lambda: ME.SparseTensor(x, coords)


@pytest.mark.parametrize("framework", CLOSED)
def test_the_networks_of_the_examples_are_closed(framework):
    with models(framework, profile="2.1" if framework == "torchsparse" else None):
        network, made = _unet(framework)
        x = made()
        with Audit(network, _Tensors()) as audit:
            network(x)
        guards = audit.guards()
        network(made())
        assert guards.hold(), guards.changed()
        norm = next(module for module in network.modules() if isinstance(module, torch.nn.BatchNorm1d))
        norm.momentum = 0.7
        assert "momentum: 0.7, was" in guards.changed()
