"""Every switch of torchsparse has its effect, is refused, or is said to have no meaning."""

from __future__ import annotations

import copy
import importlib
import inspect
import pathlib
import re

import pytest
import torch

from sparse_bridge import log
from sparse_bridge.adapters.torchsparse import conv, signatures
from sparse_bridge.adapters.torchsparse.profile import PROFILES
from sparse_bridge.errors import SparseBridgeError
from sparse_bridge.tools.api_coverage import table

from .conftest import speaking
from .test_conv import points

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "torchsparse.md"
GEOMETRY = {
    "bias",
    "transposed",
    "padding",
    "generative",
    "kernel_size",
    "stride",
    "spatial_range",
    "tensor_stride",
    "kmap",
}


def listed():
    """{switch: what the page says of it}."""
    section = PAGE.read_text().partition("## Switches")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    found = {}
    for names, state, *_ in rows[2:]:
        for name in re.findall(r"`([^`]+)`", names):
            assert name not in found, f"{name} is listed twice"
            found[name] = state.strip()
    return found


def existing(ts):
    """The switches that the stand-in has, asked of itself."""
    F = ts.nn.functional
    cache = importlib.import_module("torchsparse.utils.tensor_cache")
    build = importlib.import_module("torchsparse.nn.functional.conv.kmap.build_kmap")
    found = {f"config.{name}" for name in F.conv_config.get_default_conv_config()}
    for module in (F, F.conv_config, ts.tensor, cache):
        found |= {name for name in vars(module) if name.startswith("set_")}
    entries = [e for e in table.entries("torchsparse", "2.1") if e.module == "torchsparse.backends"]
    found |= {f"backends.{e.name}" for e in entries if e.name not in ("", "init")}
    found |= {f"backends.{name}" for name, value in vars(ts.backends).items() if isinstance(value, (bool, int, float))}
    arguments = {
        "Conv3d": {name for names in signatures._LAYER.values() for name in names},
        "conv3d": {name for names in signatures._FUNCTION.values() for name in names},
        "build_kernel_map": {*build._OLD, *build._NEW},
        "transpose_kernel_map": set(inspect.signature(F.transpose_kernel_map).parameters),
        "GPUHashTable": set(inspect.signature(ts.backend.GPUHashTable).parameters),
    }
    for function, names in arguments.items():
        chosen = names - GEOMETRY | ({"generative"} & names if function.startswith("build") else set())
        found |= {f"{function}({name}=)" for name in chosen}
    return found | {"tune"}


def test_the_page_lists_the_switches_that_exist(ts21):
    assert set(listed()) == existing(ts21)
    assert set(listed().values()) == {"effect", "no meaning", "refused"}


@pytest.fixture
def run(ts21):
    """(coordinates, features) of a small network over repeated rows; its bits are what counts."""
    coords = points("2.1", seed=1)
    coords = torch.cat([coords, coords[:4]])
    feats = torch.randn(len(coords), 4)
    torch.manual_seed(0)
    layers = [ts21.nn.Conv3d(4, 4, 3), ts21.nn.Conv3d(4, 4, 3, stride=2), ts21.nn.Conv3d(4, 4, 3)]

    def compute(**options):
        x = ts21.SparseTensor(feats, coords)
        for layer in layers:
            given = {"stride": layer.stride, "padding": layer.padding, **options}
            x = ts21.nn.functional.conv3d(x, layer.kernel, layer.kernel_size, **given)
        return x.C, x.F

    return compute


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def config_of(ts, **fields):
    config = ts.nn.functional.conv_config.get_default_conv_config().copy()
    config.update(fields)
    return config


# What has no meaning: other values than the defaults.
FIELDS = {
    "ifsort": [True],
    "split_mask_num": [3],
    "split_mask_num_bwd": [1],
    "epsilon": [0.5],
    "mm_thresh": [1000],
    "FOD_fusion": [False],
}
SETTERS = {"set_conv_mode": [1, 2], "set_kmap_mode": ["hashmap"], "set_downsample_mode": ["minkowski"]}
BACKENDS = {"hash_rsv_ratio": [2, 8], "benchmark": [True], "allow_fp16": [False, True], "device_capability": [700]}


def neutral(ts, run, name):
    """Results with the switch at its other values."""
    F = ts.nn.functional
    kind, _, field = name.partition(".")
    if name == "config.dataflow":
        for flow in (F.Dataflow.GatherScatter, F.Dataflow.FetchOnDemand):
            yield run(config=config_of(ts, dataflow=flow))
    elif kind == "config":
        for value in FIELDS[field]:
            yield run(config=config_of(ts, **{field: value}))
    elif kind == "backends":
        for value in BACKENDS[field]:
            setattr(ts.backends, field, value)
            yield run()
    elif name == "set_allow_negative_coordinates":
        ts.tensor.set_allow_negative_coordinates(True)
        yield run()
        ts.tensor.set_allow_negative_coordinates(False)
    elif name in SETTERS:
        default = {"set_conv_mode": 0, "set_kmap_mode": "hashmap_on_the_fly", "set_downsample_mode": "spconv"}
        for value in SETTERS[name]:
            getattr(F, name)(value)
            yield run()
        getattr(F, name)(default[name])
    elif name in ("conv3d(dilation=)", "conv3d(training=)"):
        yield run(**{name[7:-2]: 2})
    elif name == "Conv3d(dilation=)":
        x = ts.SparseTensor(torch.randn(9, 2), points("2.1")[:9].contiguous())
        layers = [ts.nn.Conv3d(2, 2, 3, dilation=d) for d in (1, 3)]
        layers[1].load_state_dict(layers[0].state_dict())
        assert torch.equal(*(layer(x).F for layer in layers))
        yield run()
    elif name == "tune":
        net = ts.nn.Conv3d(2, 2, 3)
        before = copy.deepcopy(net.state_dict())
        ts.tune(net, [], 3, enable_fp16=True, kmap_mode="grid", tune_with_bwd=True)
        assert net.kernel.dtype == torch.float32 and net._config is None
        assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
        yield run()
    else:
        yield from neutral_arguments(ts, run, name)


def neutral_arguments(ts, run, name):
    F, coords = ts.nn.functional, points("2.1", seed=2)
    function, argument = name[:-2].split("(")
    if function == "build_kernel_map":
        value = F.Dataflow.GatherScatter if argument == "dataflow" else 1
        given = {"input_node_num": len(coords), "kernel_size": 3, "stride": 2}
        ones = [F.build_kernel_map(coords, **{**given, **more}) for more in ({}, {argument: value})]
        assert torch.equal(*(kmap["out_in_map"] for kmap in ones))
    elif function == "transpose_kernel_map":
        kmaps = [F.build_kernel_map(coords, len(coords), 3, 2) for _ in range(2)]
        F.transpose_kernel_map(kmaps[0])
        F.transpose_kernel_map(kmaps[1], **{argument: 3})
        assert torch.equal(*(kmap["out_in_map_t"] for kmap in kmaps))
    else:
        assert function == "GPUHashTable"
        keys, vals = torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int32)
        tables = [ts.backend.GPUHashTable(4), ts.backend.GPUHashTable(keys, vals)]
        found = []
        for one in tables:
            one.insert_vals(torch.arange(40))
            found.append(one.lookup_vals(torch.arange(50)))
        assert torch.equal(*found) and found[0][:50].tolist() == [*range(1, 41), *[0] * 10]
    yield run()


OLD = ("conv3d(epsilon=)", "conv3d(mm_thresh=)")
NEUTRAL = [name for name, state in listed().items() if state == "no meaning" and name not in OLD]


@pytest.mark.parametrize("name", NEUTRAL)
def test_no_meaning(ts21, run, name):
    want = run()
    results = list(neutral(ts21, run, name))
    assert results and all(same(want, one) for one in results)


@pytest.mark.parametrize("name", OLD)
def test_no_meaning_in_2_0(name):
    with speaking("2.0") as ts:
        coords = points("2.0", seed=2)
        x, weight = torch.randn(len(coords), 2), torch.randn(27, 2, 2)
        assert listed()[name] == "no meaning"
        one, other = (
            ts.nn.functional.conv3d(ts.SparseTensor(x, coords), weight, 3, **more).F for more in ({}, {name[7:-2]: 1})
        )
        assert torch.equal(one, other)
        config = ts.nn.Conv3d(2, 2, 3).config
        assert set(config) == {"epsilon", "mm_thresh", "kmap_mode"}


def _kmap_mode(ts, run):
    assert not same(run(), run(config=config_of(ts, kmap_mode="hashmap")))


def _downsample_mode(ts, run):
    other = config_of(ts, kmap_mode="hashmap", downsample_mode="minkowski")
    assert not same(run(config=config_of(ts, kmap_mode="hashmap")), run(config=other))


def _global_config(ts, run):
    config, before = config_of(ts, kmap_mode="hashmap"), run()
    ts.nn.functional.conv_config.set_global_conv_config(config)
    assert same(run(), run(config=config)) and not same(before, run())
    assert same(before, run(config=config_of(ts)))  # a layer's own comes first


def _layer_config(ts, run):
    coords = points("2.1", seed=3)
    x = [ts.SparseTensor(torch.ones(len(coords), 1), coords) for _ in range(2)]
    layers = [ts.nn.Conv3d(1, 1, 3, 2, config=c) for c in (None, config_of(ts, kmap_mode="hashmap"))]
    layers[1].load_state_dict(layers[0].state_dict())
    ys = [layer(one) for layer, one in zip(layers, x, strict=True)]
    assert not torch.equal(ys[0].F, ys[1].F)


def _cache_mode(ts, run):
    cache = importlib.import_module("torchsparse.utils.tensor_cache")
    coords = points("2.1")
    made = lambda: ts.SparseTensor(torch.ones(len(coords), 1), coords)  # noqa: E731
    assert made()._caches is not made()._caches
    cache.set_tensor_cache_mode(cache.TensorCacheMode.GLOBAL_TENSOR_CACHE)
    assert made()._caches is made()._caches


def _global_cache(ts, run):
    cache = importlib.import_module("torchsparse.utils.tensor_cache")
    mine = cache.TensorCache()
    cache.set_tensor_cache_mode(cache.TensorCacheMode.GLOBAL_TENSOR_CACHE)
    cache.set_global_tensor_cache(mine)
    coords = points("2.1")
    ts.nn.Conv3d(1, 1, 3)(ts.SparseTensor(torch.ones(len(coords), 1), coords))
    assert len(mine.kmaps) == 1


def _tf32(ts, run):
    for allowed in (True, False):
        ts.backends.allow_tf32 = allowed
        assert conv.allow_tf32(PROFILES["2.1"], torch.device("cuda")) is allowed


def _map_mode(ts, run):
    F, coords = ts.nn.functional, points("2.1", seed=2)
    one, other = (
        F.build_kernel_map(coords, len(coords), 2, 1, mode=mode)["out_in_map"]
        for mode in ("hashmap", "hashmap_on_the_fly")
    )  # the same for even kernels, but for repeated rows
    assert torch.equal(one, other)
    twice = torch.cat([coords, coords])
    one, other = (
        F.build_kernel_map(twice, len(twice), 3, 1, mode=mode)["out_in_map"]
        for mode in ("hashmap", "hashmap_on_the_fly")
    )
    assert not torch.equal(one, other)


def _map_rule(ts, run):
    F, coords = ts.nn.functional, points("2.1", seed=2)
    one, other = (
        F.build_kernel_map(coords, len(coords), 3, 2, downsample_mode=rule)["coords"]
        for rule in ("spconv", "minkowski")
    )
    assert one.shape != other.shape


def _generative_map(ts, run):
    F, coords = ts.nn.functional, points("2.1", seed=2)
    ranges, config = (2, 40, 40, 40), config_of(ts, kmap_mode="hashmap")
    kmap = F.build_kernel_map(coords, len(coords), 3, 2, spatial_range=ranges, mode="hashmap", generative=True)
    x = torch.randn(len(coords), 2)
    weight = torch.randn(27, 2, 3)
    y = F.conv3d(
        ts.SparseTensor(x, coords, 2, ranges), weight, 3, stride=2, config=config, transposed=True, generative=True
    )
    assert torch.equal(kmap["coords"], y.C) and kmap["sizes"] == (len(coords), len(y.C))
    want = torch.zeros(len(y.C), 3)
    for v, column in enumerate(kmap["out_in_map"][: len(y.C)].t().long()):
        rows = (column >= 0).nonzero()[:, 0]
        want[rows] += x[column[rows]] @ weight[v]
    torch.testing.assert_close(y.F, want)


EFFECTS = {
    "config.kmap_mode": _kmap_mode,
    "config.downsample_mode": _downsample_mode,
    "set_global_conv_config": _global_config,
    "Conv3d(config=)": _layer_config,
    "conv3d(config=)": _kmap_mode,
    "set_tensor_cache_mode": _cache_mode,
    "set_global_tensor_cache": _global_cache,
    "backends.allow_tf32": _tf32,
    "build_kernel_map(mode=)": _map_mode,
    "build_kernel_map(downsample_mode=)": _map_rule,
    "build_kernel_map(generative=)": _generative_map,
}


@pytest.mark.parametrize("name", [name for name, state in listed().items() if state == "effect"])
def test_effects(ts21, run, name):
    EFFECTS[name](ts21, run)


def test_refusals(ts21, run):
    F, coords = ts21.nn.functional, points("2.1")
    for fields in (
        {"kmap_mode": "grid"},
        {"downsample_mode": "dense"},
        {"dataflow": F.Dataflow.CodedCSR},
        {"dataflow": "fast"},
    ):
        with pytest.raises((AssertionError, ValueError)) as caught:
            run(config=config_of(ts21, **fields))
        assert isinstance(caught.value, SparseBridgeError)
    for given in (
        {"mode": "grid"},
        {"mode": "tree"},
        {"downsample_mode": "dense"},
        {"dataflow": F.Dataflow.CodedCSR},
        {"generative": True},
        {"generative": True, "mode": "hashmap_on_the_fly", "spatial_range": (2, 9, 9, 9)},
    ):
        with pytest.raises((AssertionError, ValueError, NotImplementedError)):
            F.build_kernel_map(coords, len(coords), 3, 2, **given)
    with pytest.raises(AssertionError, match="expected one of spconv, minkowski"):
        F.spdownsample(coords, 2, 3, downsample_mode="dense")
    ts21.backends.hash_rsv_ratio = 1
    with pytest.raises(AssertionError, match="hash_rsv_ratio is 1; expected 2 or more"):
        run()
    run(config=config_of(ts21, kmap_mode="hashmap"))  # which has no such table
    with speaking("2.0") as old:
        x = old.SparseTensor(torch.ones(2, 1), torch.tensor([[0, 0, 0, 0], [1, 1, 1, 0]]).int())
        with pytest.raises(NotImplementedError, match="grid"):
            old.nn.functional.conv3d(x, torch.ones(27, 1, 1), 3, kmap_mode="grid")
    assert [name for name, state in listed().items() if state == "refused"] == ["conv3d(kmap_mode=)"]


def test_setters_say_that_they_change_nothing(ts21, caplog):
    log.reset()
    with caplog.at_level("INFO", "sparse_bridge"):
        ts21.nn.functional.set_kmap_mode("hashmap")
        ts21.nn.functional.set_downsample_mode("minkowski")
    ts21.nn.functional.set_kmap_mode("hashmap_on_the_fly")
    ts21.nn.functional.set_downsample_mode("spconv")
    for field in ("kmap_mode", "downsample_mode"):
        assert f"set_{field} changes no layer" in caplog.text


@pytest.mark.gpu
def test_tf32_changes_bits(ts21):
    coords = points("2.1", shape=(12, 12, 12)).cuda()
    feats, layer = torch.randn(len(coords), 64).cuda(), ts21.nn.Conv3d(64, 64, 3).cuda()
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU has no TF32")
    found = []
    for allowed in (False, True):
        ts21.backends.allow_tf32 = allowed
        with torch.no_grad():
            found.append(layer(ts21.SparseTensor(feats, coords.clone())).F)
    assert not torch.equal(*found)
