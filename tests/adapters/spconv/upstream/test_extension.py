"""spconv's compiled operations: the same calls to the real wheel and to the stand-in, and programs
that drive the operations themselves."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest
import torch

from .. import doors

RULES = {
    "subm": {"ksize": [3] * 3, "stride": [1] * 3, "padding": [1] * 3, "subm": True},
    "strided": {"ksize": [3] * 3, "stride": [2] * 3, "padding": [1] * 3, "subm": False},
    "even": {"ksize": [2] * 3, "stride": [2] * 3, "padding": [0] * 3, "subm": False},
    "one axis": {"ksize": [3, 1, 1], "stride": [2, 1, 1], "padding": [0] * 3, "subm": False},
}
CLASSES = {
    "csrc.sparse.all": ["SpconvOps"],
    "csrc.sparse.convops.spops": ["ConvGemmOps"],
    "csrc.sparse.inference": ["InferenceOps"],
    "csrc.sparse.convops.convops": ["ConvTunerSimple"],
}


def arguments(rule):
    sizes = [[1] * 3, [0] * 3]
    return (rule["ksize"], rule["stride"], rule["padding"], *sizes, rule["subm"], False)


def pair_lists(module, x, rule):
    """(number of rows, {offset: sorted pairs}) of the compiled builder of pair lists."""
    ops = importlib.import_module("spconv.core_cc.csrc.sparse.all").SpconvOps
    keys = importlib.import_module("spconv.constants").AllocKeys
    memory = module.cppcore.TorchAllocator(torch.device("cpu"))
    indices = module.cppcore.torch_tensor_to_tv(x.indices)
    n = ops.get_indice_pairs(memory, indices, 2, x.spatial_shape, 0, *arguments(rule))
    pairs, counts = (memory.allocated[key] for key in (keys.PairFwd, keys.IndiceNumPerLoc))
    out = x.indices if rule["subm"] else memory.allocated[keys.OutIndices][:n]
    sites_in, sites_out = x.indices.tolist(), out.tolist()
    found = {}
    for v, count in enumerate(counts.tolist()):
        rows = pairs[:, v, :count].t().tolist()
        found[v] = sorted((sites_in[i], sites_out[o]) for i, o in rows)
    return n, counts.tolist(), found, sorted(sites_out)


@pytest.mark.parametrize("name", RULES)
def test_pair_lists_equal_the_wheels(name):
    sp = doors.wheel()
    want = pair_lists(sp, doors.tensor(sp), RULES[name])
    with doors.standin() as standin:
        assert pair_lists(standin, doors.tensor(standin), RULES[name]) == want


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("do_sort", [True, False])
def test_a_program_drives_implicit_gemm(standin, name, do_sort):
    """What exporters do: tables by SpconvOps, the product by ConvGemmOps."""
    from spconv.algo import CONV_CPP
    from spconv.constants import AllocKeys
    from spconv.core_cc.csrc.sparse.all import SpconvOps
    from spconv.core_cc.csrc.sparse.convops.spops import ConvGemmOps

    rule, tv = RULES[name], standin.cppcore.torch_tensor_to_tv
    x = doors.tensor(standin)
    memory = standin.cppcore.TorchAllocator(torch.device("cpu"))
    masks, n = SpconvOps.get_indice_pairs_implicit_gemm(
        memory, tv(x.indices), 2, x.spatial_shape, 1, *arguments(rule), False, do_sort=do_sort
    )
    held = memory.allocated
    table, volume = held[AllocKeys.PairFwd], rule["ksize"][0] * rule["ksize"][1] * rule["ksize"][2]
    assert table.shape == (volume, n) and masks.numpy()[0] == (1 << volume) - 1
    order, mask = held[AllocKeys.MaskArgSort], held[AllocKeys.PairMask]
    assert order.shape == mask.shape == (1, n)
    assert sorted(order[0].tolist()) == list(range(n))
    sort = mask[0][order[0].long()].tolist()
    assert sort == sorted(sort) if do_sort else order[0].tolist() == list(range(n))
    bits = sum((table[v] >= 0).int() << v for v in range(volume))
    assert torch.equal(bits.int(), mask[0])

    cls = standin.SubMConv3d if rule["subm"] else standin.SparseConv3d
    layer = cls(4, 5, rule["ksize"], rule["stride"], rule["padding"])
    want = layer(x)
    made = standin.cppcore.TorchAllocator(torch.device("cpu"))
    with torch.no_grad():
        ConvGemmOps.implicit_gemm(
            made, CONV_CPP, tv(x.features), tv(layer.weight), tv(table),
            [tv(mask)], [tv(order)], n, masks, standin.cppcore.get_arch(), bias=tv(layer.bias),
        )  # fmt: skip
    sites = x.indices if rule["subm"] else held[AllocKeys.OutIndices]
    got = standin.SparseConvTensor(made.allocated["OutFeatures"], sites, want.spatial_shape, 2)
    doors.assert_same(got, want)


def test_pair_list_products_and_gradients(standin):
    from spconv.algo import GEMM_CPP
    from spconv.core_cc.csrc.sparse.all import SpconvOps
    from spconv.core_cc.csrc.sparse.convops.spops import ConvGemmOps

    core, tv = standin.cppcore, standin.cppcore.torch_tensor_to_tv
    x, rule = doors.tensor(standin, dtype=torch.float64), RULES["subm"]
    memory = core.TorchAllocator(torch.device("cpu"))
    SpconvOps.get_indice_pairs(memory, tv(x.indices), 2, x.spatial_shape, 0, *arguments(rule))
    lists = [tv(memory.allocated[name]) for name in ("PairFwd", "IndiceNumPerLoc")]
    layer = standin.SubMConv3d(4, 5, 3, bias=False).double()
    features = x.features.clone().requires_grad_()
    want = layer(x.replace_feature(features)).features
    dy = torch.randn_like(want)
    dx, dw = torch.autograd.grad(want, [features, layer.weight], dy)
    multiply, common = core.TorchSpconvMatmul(memory), (GEMM_CPP, True, False, tv(x.features))
    ConvGemmOps.indice_conv(
        memory, multiply, *common, tv(layer.weight), *lists, (0, 0), len(dy), False, True
    )
    torch.testing.assert_close(memory.allocated["OutFeatures"], want.detach())
    ConvGemmOps.indice_conv_backward(
        memory, multiply, *common, tv(layer.weight), tv(dy), *lists, (0, 0), False, True
    )
    torch.testing.assert_close(memory.allocated["DIn"], dx)
    torch.testing.assert_close(memory.allocated["DFilters"], dw)


def allocations(module):
    """What an allocator does with names, kinds and addresses."""
    tv = importlib.import_module("cumm.tensorview")
    memory = module.cppcore.TorchAllocator(torch.device("cpu"))
    first = memory.zeros("x", [2, 3], tv.float32, -1)
    memory.full_int("y", [2], 7, tv.int32, -1)
    memory.full_float("z", [2], 1.5, tv.float32, -1, 0, True)
    wide = memory.zeros("u", [2], tv.uint32, -1)
    names = [name for name in memory.allocated if isinstance(name, str)]
    memory.free(first)
    with pytest.raises(ValueError, match="can't find"):
        memory.free(first)
    memory.free_noexcept(first)
    with pytest.raises(KeyError):
        memory.get_tensor_by_name("nothing")
    return (
        names, len(memory.allocated), wide.dtype, memory.allocated["u"].dtype,
        memory.get_tensor_by_name("y").numpy().tolist(), first.shape,
        module.cppcore._TORCH_DTYPE_TO_TV, module.cppcore._TORCH_UINT_WORKAROUNDS,
        module.cppcore._TV_DTYPE_TO_TORCH, module.cppcore._ALL_INTS,
    )  # fmt: skip


def test_allocator_equals_the_wheels():
    want = allocations(doors.wheel())
    with doors.standin() as standin:
        assert allocations(standin) == want


def names_of(function):
    """Parameter names of a Python function, or of a compiled one by its first line of text."""
    if inspect.isfunction(function):
        return list(inspect.signature(function).parameters)
    line = function.__doc__.split(" -> ")[0].partition("(")[2]
    return re.findall(r"(?:^|, )(\w+): ", line)


def test_parameters_equal_the_wheels():
    doors.wheel()
    theirs = {}
    for module, classes in CLASSES.items():
        for name in classes:
            cls = getattr(importlib.import_module(f"spconv.core_cc.{module}"), name)
            for method in dir(cls):
                if not method.startswith("_") and inspect.getdoc(getattr(cls, method)):
                    theirs[module, name, method] = names_of(getattr(cls, method))
    compared = 0
    with doors.standin():
        for (module, name, method), parameters in theirs.items():
            cls = getattr(importlib.import_module(f"spconv.core_cc.{module}"), name)
            ours = inspect.getattr_static(cls, method, None)
            if ours is not None:
                assert names_of(ours.__func__) == parameters, method
                compared += 1
    assert compared >= 14


def test_bias_and_activation_in_place(standin):
    from cumm import tensorview as tv
    from spconv.core_cc.csrc.sparse.inference import InferenceOps

    x = torch.tensor([[-1.0, 2.0], [0.5, -3.0]])
    bias = tv.from_torch(torch.tensor([1.0, -1.0]))
    for kind, function in {
        "None_": lambda t: t, "ReLU": torch.relu, "Sigmoid": torch.sigmoid,
        "LeakyReLU": lambda t: torch.nn.functional.leaky_relu(t, 0.1),
    }.items():  # fmt: skip
        got = x.clone()
        InferenceOps.bias_add_act_inplace(
            tv.from_torch(got), bias, tv.gemm.Activation.__members__[kind], 0.1
        )
        torch.testing.assert_close(got, function(x + torch.tensor([1.0, -1.0])))


def test_int8_scales_are_refused(standin):
    from cumm import tensorview as tv
    from spconv.core_cc.csrc.sparse.convops.spops import ConvGemmOps

    from sparse_bridge.errors import UnsupportedError

    scale = tv.from_torch(torch.ones(4))
    with pytest.raises(UnsupportedError, match="int8"):
        ConvGemmOps.implicit_gemm(*[None] * 10, scale=scale)
