"""spconv's compiled operations: the same calls to the real wheel and to the stand-in, and programs
that drive the operations themselves."""

from __future__ import annotations

import importlib
import inspect
import re

import numpy as np
import pytest
import torch

from .. import apis

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
    sp = apis.wheel()
    want = pair_lists(sp, apis.tensor(sp), RULES[name])
    with apis.standin() as standin:
        assert pair_lists(standin, apis.tensor(standin), RULES[name]) == want


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("do_sort", [True, False])
def test_a_program_drives_implicit_gemm(standin, name, do_sort):
    """What exporters do: tables by SpconvOps, the product by ConvGemmOps."""
    from spconv.algo import CONV_CPP
    from spconv.constants import AllocKeys
    from spconv.core_cc.csrc.sparse.all import SpconvOps
    from spconv.core_cc.csrc.sparse.convops.spops import ConvGemmOps

    rule, tv = RULES[name], standin.cppcore.torch_tensor_to_tv
    x = apis.tensor(standin)
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
            made,
            CONV_CPP,
            tv(x.features),
            tv(layer.weight),
            tv(table),
            [tv(mask)],
            [tv(order)],
            n,
            masks,
            standin.cppcore.get_arch(),
            bias=tv(layer.bias),
        )
    sites = x.indices if rule["subm"] else held[AllocKeys.OutIndices]
    got = standin.SparseConvTensor(made.allocated["OutFeatures"], sites, want.spatial_shape, 2)
    apis.assert_same(got, want)


def test_pair_list_products_and_gradients(standin):
    from spconv.algo import GEMM_CPP
    from spconv.core_cc.csrc.sparse.all import SpconvOps
    from spconv.core_cc.csrc.sparse.convops.spops import ConvGemmOps

    core, tv = standin.cppcore, standin.cppcore.torch_tensor_to_tv
    x, rule = apis.tensor(standin, dtype=torch.float64), RULES["subm"]
    memory = core.TorchAllocator(torch.device("cpu"))
    SpconvOps.get_indice_pairs(memory, tv(x.indices), 2, x.spatial_shape, 0, *arguments(rule))
    lists = [tv(memory.allocated[name]) for name in ("PairFwd", "IndiceNumPerLoc")]
    layer = standin.SubMConv3d(4, 5, 3, bias=False).double()
    features = x.features.clone().requires_grad_()
    want = layer(x.replace_feature(features)).features
    dy = torch.randn_like(want)
    dx, dw = torch.autograd.grad(want, [features, layer.weight], dy)
    multiply, common = core.TorchSpconvMatmul(memory), (GEMM_CPP, True, False, tv(x.features))
    ConvGemmOps.indice_conv(memory, multiply, *common, tv(layer.weight), *lists, (0, 0), len(dy), False, True)
    torch.testing.assert_close(memory.allocated["OutFeatures"], want.detach())
    ConvGemmOps.indice_conv_backward(memory, multiply, *common, tv(layer.weight), tv(dy), *lists, (0, 0), False, True)
    torch.testing.assert_close(memory.allocated["DIn"], dx)
    torch.testing.assert_close(memory.allocated["DFilters"], dw)


def rows_on_the_cpu(ops, tv):
    """What the compiled loops over rows leave in memory that held other values."""
    rng = np.random.default_rng(0)
    x = rng.integers(-3, 4, (6, 3)).astype(np.float32)  # with ties
    y = np.arange(12, dtype=np.float32).reshape(4, 3)
    out_rows, in_rows = (np.array(rows, np.int32) for rows in ([0, 1, 1, 2], [5, 4, 3, 1]))
    gathered, added, pooled, gradient = (
        np.full(shape, value, np.float32) for shape, value in (((5, 3), 9), ((6, 3), 1), ((4, 3), -1), ((6, 3), 1))
    )
    as_tv = tv.from_numpy
    ops.gather_cpu(as_tv(gathered), as_tv(x), as_tv(in_rows))
    ops.scatter_add_cpu(as_tv(added), as_tv(y), as_tv(np.array([2, 2, 5], np.int32)))
    rows = as_tv(out_rows), as_tv(in_rows)
    ops.maxpool_forward_cpu(as_tv(pooled), as_tv(x), *rows)
    ops.maxpool_backward_cpu(as_tv(pooled), as_tv(x), as_tv(y), as_tv(gradient), *rows)
    return gathered, added, pooled, gradient


def test_loops_over_rows_equal_the_wheels():
    apis.wheel()
    parts = "spconv.core_cc.csrc.sparse.all", "cumm.tensorview"
    ops, tv = map(importlib.import_module, parts)
    want = rows_on_the_cpu(ops.SpconvOps, tv)
    with apis.standin():
        ops, tv = map(importlib.import_module, parts)
        got = rows_on_the_cpu(ops.SpconvOps, tv)
        for mine, theirs in zip(got, want, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        out, row = tv.zeros([2, 3]), tv.from_numpy(np.array([-1], np.int32))
        for call in (ops.SpconvOps.gather_cpu, ops.SpconvOps.scatter_add_cpu):
            with pytest.raises((IndexError, RuntimeError), match="out of"):  # no row from the end
                call(out, tv.zeros([2, 3]), row)
        with pytest.raises(RuntimeError, match="read-only"):
            ops.SpconvOps.maximum_value_int(out.get_readonly(), 1, 0)


@pytest.mark.parametrize("name", RULES)
def test_pools_in_place_are_those_of_layers(standin, name):
    """By pair lists, offset by offset, and by tables, with their gradients."""
    from spconv.core_cc.csrc.sparse.all import SpconvOps

    rule, tv, ops = RULES[name], standin.cppcore.torch_tensor_to_tv, standin.ops
    x = apis.tensor(standin).features.mul(2).round().requires_grad_()  # with ties
    place = apis.tensor(standin).indices, 2, [7, 8, 9], standin.ConvAlgo.Native
    rows, lists, counts = ops.get_indice_pairs(*place, *arguments(rule))
    fwd, bwd = ops.get_indice_pairs_implicit_gemm(*place, *arguments(rule))[2:4]
    n = len(place[0]) if rule["subm"] else len(rows)
    want = ops.indice_maxpool_implicit_gemm(x, fwd, n)
    dy = torch.randn_like(want).detach()
    (dx,) = torch.autograd.grad(want, x, dy)
    x, want, mean = x.detach(), want.detach(), torch.empty_like(want)
    pooled = [torch.zeros_like(want) for _ in range(2)]
    SpconvOps.maxpool_implicit_gemm_forward(tv(pooled[0]), tv(x), tv(fwd))
    offsets = [
        (tv(made[:count]), tv(given[:count]))
        for (given, made), count in zip(lists.transpose(0, 1), counts.tolist(), strict=True)
    ]
    if rule["subm"]:  # whose lists hold half of the offsets
        offsets = [(tv((table >= 0).nonzero().flatten().int()), tv(table[table >= 0])) for table in fwd]
    else:
        pooled.append(torch.zeros_like(want))
        SpconvOps.indice_maxpool(tv(pooled[2]), tv(x), tv(lists), tv(counts), n)
    for made, given in offsets:
        SpconvOps.maxpool_forward(tv(pooled[1]), tv(x), made, given)
    assert all(torch.equal(got, want) for got in pooled)
    gradients = [torch.zeros_like(x) for _ in range(2)]
    SpconvOps.maxpool_implicit_gemm_backward(tv(want), tv(x), tv(dy), tv(gradients[0]), tv(bwd))
    for made, given in offsets:
        SpconvOps.maxpool_backward(tv(want), tv(x), tv(dy), tv(gradients[1]), made, given)
    if not rule["subm"]:
        gradients.append(torch.zeros_like(x))
        given = tv(want), tv(dy), tv(lists), tv(counts)
        SpconvOps.indice_maxpool_backward(tv(gradients[2]), tv(x), *given)
    for got in gradients:
        torch.testing.assert_close(got, dx)
    count = torch.zeros(n, dtype=torch.int32)
    SpconvOps.avgpool_implicit_gemm_forward(tv(mean), tv(x), tv(fwd), tv(count))
    expected, present = ops.indice_avgpool_implicit_gemm(x, fwd, n, True)
    assert torch.equal(mean, expected) and torch.equal(count, present)
    SpconvOps.avgpool_implicit_gemm_backward(tv(dy), tv(gradients[0]), tv(bwd), tv(count))
    leaf = x.clone().requires_grad_()
    made, _ = ops.indice_avgpool_implicit_gemm(leaf, fwd, n, False)
    torch.testing.assert_close(gradients[0], torch.autograd.grad(made, leaf, dy)[0])


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
        names,
        len(memory.allocated),
        wide.dtype,
        memory.allocated["u"].dtype,
        memory.get_tensor_by_name("y").numpy().tolist(),
        first.shape,
        module.cppcore._TORCH_DTYPE_TO_TV,
        module.cppcore._TORCH_UINT_WORKAROUNDS,
        module.cppcore._TV_DTYPE_TO_TORCH,
        module.cppcore._ALL_INTS,
    )


def test_allocator_equals_the_wheels():
    want = allocations(apis.wheel())
    with apis.standin() as standin:
        assert allocations(standin) == want


def names_of(function):
    """Parameter names of a Python function, or of a compiled one by its first line of text."""
    if inspect.isfunction(function):
        return list(inspect.signature(function).parameters)
    line = function.__doc__.split(" -> ")[0].partition("(")[2]
    return re.findall(r"(?:^|, )(\w+): ", line)


def test_parameters_equal_the_wheels():
    apis.wheel()
    theirs = {}
    for module, classes in CLASSES.items():
        for name in classes:
            cls = getattr(importlib.import_module(f"spconv.core_cc.{module}"), name)
            for method in dir(cls):
                if not method.startswith("_") and inspect.getdoc(getattr(cls, method)):
                    theirs[module, name, method] = names_of(getattr(cls, method))
    compared = 0
    with apis.standin():
        for (module, name, method), parameters in theirs.items():
            cls = getattr(importlib.import_module(f"spconv.core_cc.{module}"), name)
            ours = inspect.getattr_static(cls, method, None)
            if ours is not None:
                assert names_of(ours.__func__) == parameters, method
                compared += 1
    assert compared >= 20


def test_bias_and_activation_in_place(standin):
    from cumm import tensorview as tv
    from spconv.core_cc.csrc.sparse.inference import InferenceOps

    x = torch.tensor([[-1.0, 2.0], [0.5, -3.0]])
    bias = tv.from_torch(torch.tensor([1.0, -1.0]))
    for kind, function in {
        "None_": lambda t: t,
        "ReLU": torch.relu,
        "Sigmoid": torch.sigmoid,
        "LeakyReLU": lambda t: torch.nn.functional.leaky_relu(t, 0.1),
    }.items():
        got = x.clone()
        InferenceOps.bias_add_act_inplace(tv.from_torch(got), bias, tv.gemm.Activation.__members__[kind], 0.1)
        torch.testing.assert_close(got, function(x + torch.tensor([1.0, -1.0])))


def test_int8_scales_are_refused(standin):
    from cumm import tensorview as tv
    from spconv.core_cc.csrc.sparse.convops.spops import ConvGemmOps

    from sparse_bridge.errors import UnsupportedError

    scale = tv.from_torch(torch.ones(4))
    with pytest.raises(UnsupportedError, match="int8"):
        ConvGemmOps.implicit_gemm(*[None] * 10, scale=scale)
