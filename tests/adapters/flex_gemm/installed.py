"""Packages with the names of an installed FlexGEMM, whose kernels do not run here."""

from __future__ import annotations

import sys
import types

import torch

import sparse_bridge
from sparse_bridge.adapters.flex_gemm.v2 import functions, modules


def refuses(*args, **kwargs):
    raise RuntimeError("no kernel image")


def of_the_package(*args, **kwargs):
    """As a function that nobody has replaced says where it is from."""
    return refuses()


of_the_package.__module__ = "flex_gemm.ops"


class Refuses(torch.autograd.Function):
    """Of a build that does not run here. Its `apply` is torch's own, a class method."""

    forward = backward = staticmethod(refuses)
    _compute_neighbor_cache = _get_output_coords = staticmethod(refuses)
    _sparse_submanifold_conv_forward = _sparse_submanifold_conv_backward = staticmethod(refuses)
    _sparse_conv_forward = _sparse_conv_backward = staticmethod(refuses)
    _compute_neighbor_cache_torch = staticmethod(refuses)


def package(monkeypatch, names):
    """{name: module} of an imported package, "" first."""
    sparse_bridge.disable()
    for name in [key for key in sys.modules if key.partition(".")[0] == "flex_gemm"]:
        monkeypatch.delitem(sys.modules, name)
    made = {name: types.ModuleType(f"flex_gemm{name}") for name in ("", *names)}
    for name, module in made.items():
        module.__file__, module.__path__ = "elsewhere", []
        module.__spec__ = types.SimpleNamespace(name=module.__name__, origin="elsewhere")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        parent, _, leaf = name.rpartition(".")
        if name:
            setattr(made[parent], leaf, module)
    return made


def first(monkeypatch):
    """1.x: functions that go through `apply`."""
    triton = ".kernels.triton.spconv.config"
    folders = [triton.rsplit(".", n)[0] for n in (3, 2, 1)]
    made = package(monkeypatch, [".ops", ".ops.spconv", ".ops.grid_sample", ".ops.serialize", *folders, triton])
    spconv, grid = made[".ops.spconv"], made[".ops.grid_sample"]
    spconv.SubMConv3dFunction = type("SubMConv3dFunction", (Refuses,), {})
    spconv.SparseConv3dFunction = type("SparseConv3dFunction", (Refuses,), {})
    grid.GridSample3dFunction = type("GridSample3dFunction", (Refuses,), {})
    made[".ops.serialize"].encode_seq = made[".ops.serialize"].decode_seq = refuses
    made[triton].allow_tf32 = True

    def sparse_submanifold_conv3d(feats, coords, shape, weight, bias=None, neighbor_cache=None, dilation=(1, 1, 1)):
        apply = spconv.SubMConv3dFunction.apply
        return apply(feats, coords, shape, neighbor_cache, weight, bias, dilation)

    spconv.sparse_submanifold_conv3d = sparse_submanifold_conv3d
    grid.grid_sample_3d = refuses
    return made[""]


class _Layer(torch.nn.Module):
    """A layer of 2.0: its arguments as attributes, and a forward of its own."""

    def __init__(self, *sizes, **options):
        super().__init__()
        if len(sizes) >= 3:
            c_in, c_out, kernel, *sizes = sizes
            shape = (c_out, *([kernel] * 3 if isinstance(kernel, int) else kernel), c_in)
            self.weight = torch.nn.Parameter(torch.randn(shape))
            self.bias = torch.nn.Parameter(torch.randn(c_out))
        for name, value in options.items():
            setattr(self, name, value)

    def forward(self, *args, **kwargs):
        return refuses()


def second(monkeypatch):
    """2.0: layers, functions at the top and in `ops`, a class of caches, a switch."""
    inner = [".ops.pool", ".ops.pool.sparse_pool"]
    made = package(monkeypatch, [".nn", ".ops", ".ops.spconv", ".config", *inner])
    for name in modules.NAMES:
        base = made[".nn"].__dict__.get(name[:-2], _Layer)
        setattr(made[".nn"], name, type(name, (base,), {}))
    for owner in (made[""], made[".ops"]):
        for name in functions.NAMES:
            setattr(owner, name, of_the_package)
        owner.NeighborCache = owner.NeighborCacheT = type("NeighborCache", (), {"__module__": "flex_gemm.ops"})
    made[".ops.spconv"].sparse_submanifold_conv3d = of_the_package
    made[".ops.pool.sparse_pool"].sparse_pool3d = of_the_package
    made[".config"].SPCONV_ALLOW_TF32 = True
    return made[""]
