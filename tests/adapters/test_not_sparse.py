"""Something else where a sparse tensor belongs: one typed error, which names its kind."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sparse_bridge
from sparse_bridge import errors

from .standins import standin

OTHERS = {"None": None, "tensor": torch.ones(3, 4), "text": "x", "list": [], "number": 3, "dictionary": {"x": 1}}
Calls = dict[str, Callable[[Any], Any]]


def _spconv(sp: Any) -> Calls:
    lists = {"JoinTable": sp.JoinTable(), "AddTable": sp.AddTable()}
    lists["AddTableMisaligned"] = importlib.import_module("spconv.pytorch.tables").AddTableMisaligned()
    calls: Calls = dict(lists)
    calls |= {f"{name} of two": lambda other, layer=layer: layer([other, other]) for name, layer in lists.items()}
    layers = sp.SubMConv3d(4, 4, 3), sp.SparseMaxPool3d(2), sp.SparseGlobalMaxPool(), sp.ToDense(), sp.RemoveGrid()
    return calls | {type(layer).__name__: layer for layer in layers}


def _torchsparse(ts: Any) -> Calls:
    nn, functional = importlib.import_module("torchsparse.nn"), importlib.import_module("torchsparse.nn.functional")
    collate = importlib.import_module("torchsparse.utils.collate").sparse_collate
    x = ts.SparseTensor(torch.ones(1, 4), torch.zeros(1, 4, dtype=torch.int32))
    layers: Any = nn.Conv3d(4, 4, 3), nn.BatchNorm(4), nn.BatchNorm(4).eval(), nn.GroupNorm(2, 4), nn.InstanceNorm(4)
    layers += nn.ReLU(), nn.ReLU(True), nn.LeakyReLU(), nn.SiLU(), nn.GlobalAvgPool(), nn.GlobalMaxPool()
    layers += nn.SparseCrop(), nn.ToBEVHeightCompression(4, (2, 2, 2)), nn.ToDenseBEVConvolution(4, 4, (2, 2, 2))
    calls: Calls = {f"{place} {type(layer).__name__}": layer for place, layer in enumerate(layers)}
    calls |= {name: getattr(functional, name) for name in ("relu", "silu", "leaky_relu", "spcrop", "global_avg_pool")}
    calls |= {
        "fapply": lambda other: ts.nn.utils.fapply(other, torch.relu),
        "cat": lambda other: ts.cat([x, other]),
        "+": lambda other: x + other,
        "generative_add": lambda other: ts.generative_add(x, other),
        "sparse_collate": lambda other: collate([x, other]),
    }
    return calls


def _minkowski(ME: Any) -> Calls:
    layers: Any = ME.MinkowskiConvolution(4, 4, 3, dimension=3), ME.MinkowskiMaxPooling(2, 2, dimension=3)
    layers += ME.MinkowskiGlobalAvgPooling(), ME.MinkowskiGlobalMaxPooling(), ME.MinkowskiGlobalPooling()
    layers += ME.MinkowskiBatchNorm(4), ME.MinkowskiInstanceNorm(4), ME.MinkowskiLinear(4, 4), ME.MinkowskiReLU()
    layers += ME.MinkowskiSinusoidal(4, 4), ME.MinkowskiToDenseTensor(), ME.MinkowskiToFeature()
    calls: Calls = {type(layer).__name__: layer for layer in layers}
    functional = ME.MinkowskiFunctional
    calls |= {name: getattr(functional, name) for name in ("relu", "tanh", "dropout")}
    calls["cross_entropy"] = lambda other: functional.cross_entropy(other, torch.zeros(3).long())
    calls["MinkowskiInterpolation"] = lambda other: ME.MinkowskiInterpolation()(other, torch.ones(2, 4))
    return calls


MAKERS = {"spconv": _spconv, "torchsparse": _torchsparse, "minkowski": _minkowski}


@pytest.mark.parametrize("name", MAKERS)
def test_typed_error_names_the_kind(name):
    with standin(name) as module:
        for call_name, call in MAKERS[name](module).items():
            for kind, other in OTHERS.items():
                with pytest.raises(errors.SparseBridgeError) as info:
                    call(other)
                assert type(other).__name__ in str(info.value), (call_name, kind, info.value)


def test_tensors_of_another_framework_are_named():
    """Two of them call their tensors SparseTensor; layers that work on rows alone may take others."""
    rows = torch.ones(1, 4), torch.zeros(1, 4, dtype=torch.int32)
    with standin("spconv") as sp, standin("torchsparse") as ts, standin("minkowski") as ME:
        others = {
            "spconv": sp.SparseConvTensor(*rows, [2, 2, 2], 1),
            "torchsparse": ts.SparseTensor(*rows),
            "minkowski": ME.SparseTensor(*rows),
        }
        others["core"] = sparse_bridge.convert(others["torchsparse"], to="core")
        layers = sp.SubMConv3d(4, 4, 3), sp.SparseMaxPool3d(2), sp.ToDense(), sp.AddTable()
        calls = {"spconv": [*layers[:3], lambda x: layers[3]([x, x]), lambda x: others["spconv"] + x]}
        nn, functional = importlib.import_module("torchsparse.nn"), importlib.import_module("torchsparse.nn.functional")
        calls["torchsparse"] = [nn.Conv3d(4, 4, 3), nn.GlobalAvgPool(), functional.spcrop]
        calls["torchsparse"] += [lambda x: others["torchsparse"] + x, lambda x: ts.cat([others["torchsparse"], x])]
        calls["minkowski"] = [ME.MinkowskiConvolution(4, 4, 3, dimension=3), ME.MinkowskiReLU()]
        calls["minkowski"] += [lambda x: others["minkowski"] + x, lambda x: ME.cat(others["minkowski"], x)]
        calls["minkowski"] += [ME.MinkowskiFunctional.relu, lambda x: ME.MinkowskiUnion()(x, x)]
        calls["minkowski"] += [lambda x: ME.MinkowskiPruning()(x, torch.ones(1).bool())]
        for framework, refusing in calls.items():
            for of in others.keys() - {framework}:
                for call in refusing:
                    with pytest.raises(errors.SparseBridgeError) as info:
                        call(others[of])
                    assert f"of {of} (sparse_bridge.convert(x, to={framework!r})" in str(info.value)
                    assert "SparseModule" not in str(info.value)


def test_table_of_one_tensor():
    """A loop over branches may leave one."""
    with standin("spconv") as sp:
        x = sp.SparseConvTensor(torch.ones(1, 4), torch.zeros(1, 4, dtype=torch.int32), [2, 2, 2], 1)
        for table in (sp.JoinTable(), sp.AddTable()):
            with pytest.raises(errors.SparseBridgeError, match="takes 2 tensors or more, got a list of 1") as info:
                table([x])
            assert isinstance(info.value, IndexError)


def test_samples_of_other_keys():
    with standin("torchsparse"):
        collate = importlib.import_module("torchsparse.utils.collate").sparse_collate_fn
        with pytest.raises(KeyError, match="sample 1 has no 'a'") as info:
            collate([{"a": 1}, {"b": 1}])
        assert isinstance(info.value, errors.SparseBridgeError)
        with pytest.raises(errors.ContractError, match="no samples"):
            collate([])


def test_birds_eye_views_without_rows():
    with standin("torchsparse") as ts:
        x = ts.SparseTensor(torch.zeros(0, 4), torch.zeros(0, 4, dtype=torch.int32))
        nn = importlib.import_module("torchsparse.nn")
        assert nn.ToBEVHeightCompression(4, (5, 3, 6))(x).shape == (0, 12, 5, 6)
        assert nn.ToDenseBEVConvolution(4, 7, (5, 3, 6))(x).shape == (0, 7, 5, 6)


@pytest.mark.parametrize("value", [None, [[0, 0, 0, 0]]])
def test_torchsparse_tensor_of_anything_has_a_repr(value):
    """Debuggers and errors of pytest print tensors that are not whole."""
    with standin("torchsparse") as ts:
        assert type(value).__name__ in repr(ts.SparseTensor(torch.ones(1, 4), value))


def test_property_keeps_its_own_error():
    """Python asks `__getattr__` after a property has raised an AttributeError, and forgets that."""
    with standin("minkowski") as ME:
        coordinates = torch.tensor([[0, 1, 1], [0, 1, 2]], dtype=torch.int32)
        x = ME.MinkowskiReLU()(ME.SparseTensor(torch.ones(2, 3), coordinates))
        with pytest.raises(errors.SparseBridgeError, match="made from coordinates, not on results of layers"):
            x.inverse_mapping  # noqa: B018 - reading is the test
        with pytest.raises(errors.SparseBridgeError, match="made from coordinates"):
            x.slice(x)
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            x.nothing  # noqa: B018
