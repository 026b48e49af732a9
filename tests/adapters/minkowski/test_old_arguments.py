"""Arguments of MinkowskiEngine 0.4: by position in its order, by its names, and what is neither."""

from __future__ import annotations

import importlib
import inspect

import numpy as np
import pytest
import torch

import sparse_bridge
from sparse_bridge.adapters.minkowski.upstream.arguments import arguments_of_0_4
from sparse_bridge.errors import ContractError, DataTypeError
from sparse_bridge.tools.api_coverage import table
from tests.releases import WHOLE_GRAPHS

COORDS = [[0, 0, 0], [0, 3, 3], [1, 1, 2]]
POINTS = np.array([[0.1, 0.1, 0.1], [0.9, 0.1, 0.1], [0.1, 0.9, 0.9], [0.6, 0.6, 0.6]])


def shown(layer):
    """What a layer, or its kernel, was made of."""
    generator = getattr(layer, "kernel_generator", layer)
    text = repr(generator), generator.axis_types, generator.is_transpose, generator.dimension
    if generator is layer:
        return text
    names = ("pooling_mode", "is_transpose", "in_channels", "out_channels", "convolution_mode")
    weights = {name: value.shape for name, value in layer.state_dict().items()}
    return text, [getattr(layer, name, None) for name in names], weights


SIZE = {"kernel_size": 3, "stride": 2, "dilation": 2, "dimension": 2}
CONV = {"in_channels": 2, "out_channels": 3, "bias": True, **SIZE}
POOL = ((3, 2, 2, None, 2), SIZE)
# Layers: arguments in 0.4's order, and the same by 0.5's names.
BY_POSITION = {
    "MinkowskiConvolution": ((2, 3, 3, 2, 2, True, None, 2), CONV),
    "MinkowskiConvolutionBase": ((2, 3, 3, 2, 2, True, None, True, 2), {**CONV, "is_transpose": True}),
    "MinkowskiConvolutionTranspose": ((2, 3, 3, 2, 2, True, None, True, 2), {**CONV, "expand_coordinates": True}),
    "MinkowskiPoolingTranspose": POOL,
    "MinkowskiAvgUnpooling": POOL,
    "KernelGenerator": (
        (3, 2, 2, True, 3, None, (0, 1), 2),
        {**SIZE, "is_transpose": True, "region_type": 3, "axis_types": (0, 1)},
    ),
}
ALIKE = {  # in both releases
    "MinkowskiChannelwiseConvolution": ((2, 3, 2, 2, True, None, 2), {"in_channels": 2, "bias": True, **SIZE}),
    "MinkowskiMaxPooling": POOL,
    "MinkowskiSumPooling": POOL,
    "MinkowskiAvgPooling": POOL,
}


def found(ME, name):
    for module in ("MinkowskiPooling", "MinkowskiConvolution"):
        module = importlib.import_module(f"MinkowskiEngine.{module}")
        if hasattr(module, name):
            return getattr(module, name)
    return getattr(ME, name)


@pytest.mark.parametrize("name", [*BY_POSITION, *ALIKE])
def test_layers_by_position(ME4, name):
    layer, (given, named) = found(ME4, name), {**BY_POSITION, **ALIKE}[name]
    want = shown(layer(**named))
    assert shown(layer(*given)) == want
    # A generator in its place counts, too.
    if None in given and name != "KernelGenerator":
        generator = ME4.KernelGenerator(5, 1, 1, dimension=2)
        given = [generator if value is None else value for value in given]
        assert layer(*given).kernel_generator is generator


@pytest.mark.parametrize("name", BY_POSITION)
def test_a_dimension_where_0_5_has_none_is_recognised(ME, name):
    """Nobody named a profile: a call that only 0.4 takes says which one it is."""
    given, named = BY_POSITION[name]
    assert shown(found(ME, name)(*given)) == shown(found(ME, name)(**named))
    assert ME.__version__ == "0.4.3"


def test_0_5_reads_its_own_order():
    with sparse_bridge.enable("minkowski", profile="0.5"):
        ME = importlib.import_module("MinkowskiEngine")
        backend = importlib.import_module("MinkowskiEngineBackend._C")
        mode = backend.ConvolutionMode.COPY_GEMM
        conv = ME.MinkowskiConvolution(1, 1, 3, 1, 1, False, None, True, mode, 2)
        assert conv.kernel_generator.expand_coordinates and conv.convolution_mode is mode
        up = ME.MinkowskiPoolingTranspose(2, 2, 1, None, True, 2)
        assert up.kernel_generator.expand_coordinates and up.dimension == 2
        generator = ME.KernelGenerator(3, 1, 1, False, 0, None, True, None, 2)
        assert generator.expand_coordinates and generator.dimension == 2
        index = ME.utils.sparse_quantize(POINTS, None, None, -100, True, False, True, 0.5)
        assert index.tolist() == [0, 1, 2, 3]
        coords = torch.tensor(COORDS).int()
        x = ME.SparseTensor(torch.ones(3, 1), 2 * coords, 2)
        assert x.tensor_stride == [2, 2]


def test_quantisation_by_position(ME4):
    quantize = ME4.utils.sparse_quantize
    want = quantize(POINTS, quantization_size=0.5)
    assert len(want) == 4
    assert np.array_equal(quantize(POINTS, None, None, -100, False, False, 0.5), want)
    assert quantize(POINTS, None, None, -100, True, False, 2.0).tolist() == [0]
    index, inverse = quantize(POINTS, None, None, -100, True, True, [2.0, 0.5, 0.5])
    assert index.tolist() == [0, 2] and inverse.tolist() == [0, 0, 1, 1]
    feats, labels = np.arange(4.0)[:, None], np.array([5, 5, 5, 6], np.int32)
    coords, feats, labels = quantize(POINTS, feats, labels, 9, False, False, 2.0)
    assert coords.tolist() == [[0, 0, 0]] and feats.tolist() == [[0.0]] and labels.tolist() == [9]


def test_a_size_where_0_5_takes_a_switch_is_recognised(ME):
    found = ME.utils.sparse_quantize(POINTS, None, None, -100, False, False, 0.5)
    assert isinstance(found, np.ndarray) and len(found) == 4 and ME.__version__ == "0.4.3"


def test_collation_by_position(ME4):
    utils = ME4.utils
    coords, feats = [np.zeros((2, 3), np.int32)], [np.ones((2, 1), np.float32)]
    assert utils.sparse_collate(coords, feats, None, True)[1].dtype == torch.float64
    assert utils.sparse_collate(coords, feats, None, False)[1].dtype == torch.float32
    samples = list(zip(coords, feats, [np.zeros(2, np.int32)], strict=True))
    assert utils.batch_sparse_collate(samples, True)[1].dtype == torch.float64
    assert utils.SparseCollation(-1, True)(samples)[1].dtype == torch.float64
    assert len(utils.SparseCollation(3)([*samples, *samples])[0]) == 2


def test_tensors_by_position(ME4):
    ME, modes = ME4, ME4.SparseTensorQuantizationMode
    coords, feats = torch.tensor([*COORDS, COORDS[0]]).int(), torch.arange(4.0)[:, None]
    x = ME.SparseTensor(
        feats,
        coords * torch.tensor([1, 4, 4]).int(),
        None,
        None,
        True,
        True,
        modes.UNWEIGHTED_SUM,
        ME.MemoryManagerBackend.PYTORCH,
        4,
    )
    assert x.F.flatten().tolist() == [3.0, 1.0, 2.0] and x.tensor_stride == [4, 4]
    y = ME.SparseTensor(x.F, None, x.coords_key, x.coords_man)
    assert y.coords_key == x.coords_key
    z = ME.SparseTensor(feats, coords, None, x.coords_man, True)
    assert z.coords_man is x.coords_man
    dense, low, _ = x.dense(None, torch.IntTensor([12, 16]), False)
    assert dense.shape == (2, 1, 13, 17) and low.tolist() == [[0, 0]]
    with pytest.raises(IndexError, match="max_coords"):
        x.dense(None, torch.IntTensor([8, 8]))


def test_layers_without_a_kernel_by_position(ME4):
    ME, modes = ME4, ME4.GlobalPoolingMode
    sums = ME.MinkowskiGlobalPooling(False, modes.SPARSE)
    assert sums.pooling_mode.name == "GLOBAL_SUM_POOLING_PYTORCH_INDEX"
    assert ME.MinkowskiGlobalPooling(True).pooling_mode.name == "GLOBAL_AVG_POOLING_PYTORCH_INDEX"
    assert ME.MinkowskiGlobalSumPooling(modes.AUTO).pooling_mode is sums.pooling_mode
    base = found(ME, "MinkowskiPoolingBase")
    for average, name in ((True, "LOCAL_AVG_POOLING"), (False, "LOCAL_SUM_POOLING")):
        pool = base(3, 2, 1, None, True, average, 2)
        assert pool.pooling_mode.name == name and pool.is_transpose and pool.dimension == 2
    assert ME.MinkowskiInstanceNorm(3, modes.AUTO).num_features == 3
    norm = ME.MinkowskiBatchNorm(3, 1e-3, 0.2, False, False, D=3)
    assert (norm.bn.eps, norm.bn.momentum, norm.bn.affine) == (1e-3, 0.2, False)
    assert ME.MinkowskiPruning(dimension=2) and ME.MinkowskiBroadcastAddition(dimension=2)
    kept = importlib.import_module("MinkowskiEngine.Common").save_ctx(torch.nn.Module(), *range(8))
    assert (kept.tensor_stride, kept.region_type, kept.coords_man) == (0, 4, 7)


# what is refused


def test_what_0_4_does_not_take(ME4):
    ME = ME4
    with pytest.raises(DataTypeError, match=r"takes 8 positional arguments in 0\.4.*got 9"):
        ME.MinkowskiConvolution(1, 1, 3, 1, 1, False, None, 2, 7)
    with pytest.raises(DataTypeError, match="more than once"):
        ME.MinkowskiConvolution(1, 1, 3, 1, 1, False, None, 2, dimension=3)
    with pytest.raises(DataTypeError, match="'bias' more than once"):
        ME.MinkowskiConvolution(1, 1, 3, has_bias=True, bias=False, dimension=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'has_bais'"):
        ME.MinkowskiConvolution(1, 1, 3, has_bais=True, dimension=2)
    with pytest.raises(DataTypeError, match="sparse_quantize got an unexpected keyword"):
        ME.utils.sparse_quantize(POINTS, size=2)
    with pytest.raises(ContractError, match="average"):
        ME.MinkowskiGlobalPooling(ME.PoolingMode.GLOBAL_MAX_POOLING_KERNEL)


def test_the_table_of_0_4_is_that_of_the_calls(ME4):
    """Every callable that translates is in the table of 0.4 with its parameters."""
    entries = {e.name.rpartition(".")[2]: e for e in table.entries("minkowski", "0.4.3")}
    seen = 0
    for module in ("", ".utils", ".MinkowskiConvolution", ".MinkowskiPooling"):
        for name, value in vars(importlib.import_module(f"MinkowskiEngine{module}")).items():
            call = value.__init__ if isinstance(value, type) else value
            in_force = getattr(call, "signature_in_force", None)
            if in_force is None or name not in entries:
                continue
            parameters = entries[name].parameters
            if parameters is None:
                continue
            order = list(in_force().parameters)
            assert order[: len(parameters)] == [p.name for p in parameters], name
            seen += 1
    assert seen > 20


@WHOLE_GRAPHS
def test_arguments_in_a_graph(ME4):
    ME = ME4
    coords, feats = torch.tensor(COORDS).int(), torch.randn(3, 2)
    conv = ME.MinkowskiConvolution(2, 3, 3, 1, 1, True, None, 2)

    def by_name(feats, coords):
        return conv(ME.SparseTensor(feats=feats, coords=coords)).F

    def by_place(feats, coords):
        x = ME.SparseTensor(feats, coords)
        return conv(ME.SparseTensor(x.F, None, x.coordinate_map_key, x.coordinate_manager)).F

    for program in (by_name, by_place):
        compiled = torch.compile(program, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(feats, coords), program(feats, coords))


# the decorator


@arguments_of_0_4("a b=new gone only", also="c=new idle")
def toy(a, new=0, last=1, *, only=2):
    return a, new, last, only


def test_names_places_and_what_is_gone(ME4):
    assert toy(1, 2) == (1, 2, 1, 2) == toy(1, b=2) == toy(1, c=2, idle=3) == toy(a=1, new=2)
    assert toy(1, 2, 3) == (1, 2, 1, 2) and toy(1, 2, 3, 4) == (1, 2, 1, 4)
    assert toy(1, last=9, only=8, gone=7) == (1, 0, 9, 8)
    assert list(toy.signature_in_force().parameters) == ["a", "b", "gone", "only"]
    assert list(inspect.signature(toy).parameters) == ["a", "new", "last", "only"]
    for call in (lambda: toy(1, 2, 3, 4, 5), lambda: toy(1, 2, b=3), lambda: toy(1, other=3)):
        with pytest.raises(TypeError):
            call()


def test_names_and_places_of_0_5(ME):
    importlib.import_module("MinkowskiEngine.utils").sparse_quantize(POINTS)  # settles the profile
    assert toy(1, 2, 3) == (1, 2, 3, 2) and toy(1, b=2) == (1, 2, 1, 2)
    assert list(toy.signature_in_force().parameters) == ["a", "new", "last", "only"]
