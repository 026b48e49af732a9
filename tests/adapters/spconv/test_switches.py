"""spconv's switches: the table in docs/spconv.md lists all of them; those that are said to have an
effect have it, and those that are said to be refused are."""

from __future__ import annotations

import os
import pathlib
import re
import tempfile

import pytest
import torch

import sparse_bridge
from sparse_bridge.errors import ContractError, UnsupportedError
from tests.docs import pages

from . import apis

ROWS = pages.table(pages.ROOT / "docs/spconv.md", "| `spconv.constants` | Variable | Here |")
LIST = """
import os, sys
asked, getenv = set(), os.getenv
def listening(name, other=None):
    if sys._getframe(1).f_globals.get("__name__") == "spconv.constants":
        asked.add(name)
    return getenv(name, other)
os.getenv = listening
import sparse_bridge
{enable}
import spconv.constants as constants
names = [n for n in vars(constants) if n.isupper() and not n.startswith("_")]
print(*sorted(names), "|", *sorted(asked))
"""


def quoted(cell):
    return re.findall(r"`(\w+)[`=]", cell)


def of(kind):
    """Attributes whose row begins with this word."""
    return {name for names, _, text in ROWS if text.startswith(kind) for name in quoted(names)}


def listed(enable=""):
    names, _, variables = apis.python(LIST.format(enable=enable)).strip().partition(" | ")
    return set(names.split()), set(variables.split())


@pytest.fixture
def constants(sp, monkeypatch):
    """The module that holds the switches; what is assigned is taken back."""
    return kept(monkeypatch)


@pytest.fixture
def own_constants(standin, monkeypatch):
    """The stand-in's."""
    return kept(monkeypatch)


def kept(monkeypatch):
    import spconv.constants

    for name in vars(spconv.constants):
        if name.isupper():
            monkeypatch.setattr(spconv.constants, name, getattr(spconv.constants, name))
    return spconv.constants


def test_every_switch_is_listed():
    names, variables = listed("sparse_bridge.enable('spconv', mode='standin')")
    assert {name for row in ROWS for name in quoted(row[0])} == names
    assert {name for row in ROWS for name in quoted(row[1])} == variables
    assert names == of("effect") | of("refused") | of("no meaning")
    apis.wheel()
    theirs, read = listed()
    assert theirs == names and read == variables - {"SPCONV_USE_DIRECT_TABLE"}


def test_those_with_an_effect_are_all_tried():
    assert set(EFFECTS) == of("effect") and set(REFUSED) == of("refused")


def rows_of_new_coordinates(sp):
    algo = getattr(sp.ConvAlgo, "MaskImplicitGemm" if hasattr(sp.SparseConvTensor, "_switches") else "Native")
    return sp.SparseConv3d(4, 4, 2, 2, algo=algo)(apis.tensor(sp)).indices.tolist()


def weight_from_a_checkpoint(sp):
    layer = sp.SubMConv3d(4, 6, 3, bias=False)
    older = torch.arange(27 * 24.0).view(3, 3, 3, 4, 6)
    try:
        layer.load_state_dict({"weight": older})
    except RuntimeError:
        return None
    return layer.weight.permute(1, 2, 3, 4, 0).equal(older)


def order_of_masks(sp):
    x = apis.tensor(sp)
    y = sp.SubMConv3d(4, 4, 3, indice_key="k", algo=sp.ConvAlgo.MaskImplicitGemm)(x)
    return y.indice_dict["k"].mask_argsort_fwd_splits[0].tolist()


def flat_features(sp):
    try:
        sp.SparseConvTensor(torch.ones(3), torch.ones(3, 4).int(), [4] * 3, 1)
    except AssertionError:
        return "checked"
    return "not checked"


def initial_weights(sp):
    torch.manual_seed(0)
    return float(sp.SubMConv3d(4, 6, 3).weight.detach().abs().max())


def precision(sp):
    """Of the products that the layer asks for; the CPU has no TF32."""
    from sparse_bridge.adapters.spconv.conv import expected_of

    (asked,) = expected_of(sp.SubMConv3d(4, 6, 3))
    return asked.precision


def saved_data(sp):
    """Whether data for a bug report is in the file that the switch below names."""
    from spconv.debug_utils import spconv_save_debug_data

    spconv_save_debug_data({})
    found = DATA.exists()
    DATA.unlink(missing_ok=True)
    return found


DATA = pathlib.Path(tempfile.gettempdir()) / f"debug-data-{os.getpid()}.pkl"
# What changes, the value that changes it; True where spconv itself reads it, at its import.
EFFECTS = {
    "SPCONV_USE_DIRECT_TABLE": (rows_of_new_coordinates, False, True),
    "SPCONV_ALLOW_TF32": (precision, True, False),
    "SAVED_WEIGHT_LAYOUT": (weight_from_a_checkpoint, "RSCK", False),
    "SPCONV_FX_TRACE_MODE": (flat_features, True, True),
    "SPCONV_DO_SORT": (order_of_masks, False, True),
    "SPCONV_DEBUG_SAVE_PATH": (saved_data, str(DATA), True),
    "SPCONV_DEBUG_WEIGHT": (initial_weights, True, True),
}
REFUSED = {"ALL_WEIGHT_IS_KRSC": False, "FILTER_HWIO": True}


@pytest.mark.parametrize("name", EFFECTS)
def test_a_switch_changes_something(sp, constants, name):
    watch, value, original = EFFECTS[name]
    if original and not hasattr(sp.SparseConvTensor, "_switches"):
        pytest.skip("read by spconv, or of no meaning on its CPU")
    before = watch(sp)
    setattr(constants, name, value)
    assert watch(sp) != before


def test_what_switches_change_is_right(standin, own_constants):
    own_constants.SPCONV_DO_SORT = False
    assert order_of_masks(standin) == list(range(60))
    own_constants.SAVED_WEIGHT_LAYOUT = "RSCK"
    assert weight_from_a_checkpoint(standin) is True
    own_constants.SAVED_WEIGHT_LAYOUT = "KCRS"
    with pytest.raises(ContractError, match="'KCRS'; expected KRSC, RSKC, RSCK"):
        weight_from_a_checkpoint(standin)
    x = apis.tensor(standin)
    rule = [3] * 3, [1] * 3, [1] * 3, [1] * 3, [0] * 3
    place = x.indices, 2, [7, 8, 9], standin.ConvAlgo.MaskImplicitGemm
    for argument, switch in ((True, False), (False, True), (None, True), (None, False)):
        own_constants.SPCONV_DO_SORT = switch
        tables = standin.ops.get_indice_pairs_implicit_gemm(*place, *rule, subm=True, do_sort=argument)
        plain = tables[6][0].tolist() == list(range(60))
        assert plain is not (switch if argument is None else argument)


@pytest.mark.parametrize("name", REFUSED)
def test_layouts_of_older_releases_are_refused(standin, own_constants, name):
    setattr(own_constants, name, REFUSED[name])
    for make in (lambda: standin.SubMConv3d(4, 4, 3), lambda: standin.SparseConv2d(4, 4, 2, 2)):
        with pytest.raises(UnsupportedError, match=f"constants.{name} is {REFUSED[name]}"):
            make()


REFUSING = """
import sparse_bridge, spconv
spconv.constants.ALL_WEIGHT_IS_KRSC = False
try:
    sparse_bridge.enable("spconv", mode="patch")
except sparse_bridge.errors.UnsupportedError as error:
    print(error)
"""


@pytest.mark.slow
def test_patch_mode_refuses_them_when_it_begins():
    apis.wheel()
    assert "ALL_WEIGHT_IS_KRSC is False" in apis.python(REFUSING)
    code = "import sparse_bridge; sparse_bridge.enable('spconv', mode='standin'); import spconv"
    with pytest.raises(AssertionError, match="SPCONV_FILTER_HWIO is deprecated"):
        apis.python(code, SPCONV_FILTER_HWIO="1")


@pytest.mark.parametrize("name", sorted(of("no meaning")))
def test_the_others_change_nothing(standin, own_constants, name):
    """Whatever they are set to."""

    def state():
        torch.manual_seed(0)
        net = standin.SparseSequential(
            standin.SubMConv3d(4, 4, 3, indice_key="a"), standin.SparseConv3d(4, 4, 2, 2), standin.SparseMaxPool3d(2, 2)
        )
        y = net(apis.tensor(standin))
        return y.features, y.indices, order_of_masks(standin), precision(standin)

    before = state()
    for value in (None, False, 7, "what?"):
        setattr(own_constants, name, value)
        for mine, theirs in zip(state(), before, strict=True):
            same = torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs
            assert same


NAMES = {
    "spconv.core": "NDIM_DONT_CARE SPCONV_INT8_DEBUG ConvOpType NHWC",
    "spconv.pytorch.ops": "ALL_WEIGHT_IS_KRSC FILTER_HWIO CPU_ONLY_BUILD get_current_stream "
    "AllocKeys get_arch torch_tensor_to_tv TorchAllocator SpconvOps ConvGemmOps CUDAKernelTimer "
    "SPCONV_USE_DIRECT_TABLE SPCONV_DO_SORT ThrustSortAllocator DEBUG_INT64_HASH_K",
    "spconv.pytorch.conv": "ALL_WEIGHT_IS_KRSC FILTER_HWIO SAVED_WEIGHT_LAYOUT CPU_ONLY_BUILD Fsp "
    "ops IndiceData ImplicitGemmIndiceData SPCONV_VERSION_NUMBERS",
    "spconv.pytorch.core": "ConvAlgo PYTORCH_VERSION",
    "spconv.pytorch.functional": "SparseConvTensor HashTable ops tv CUDAKernelTimer",
    "spconv.pytorch.pool": "CPU_ONLY_BUILD Fsp ops IndiceData",
    "spconv.pytorch.utils": "SpconvOps get_current_stream torch_tensor_to_tv tv",
    "spconv.pytorch.hash": "get_current_stream torch_tensor_to_tv tv",
    "spconv.tools": "CPU_ONLY_BUILD CUDAKernelTimer nullcontext",
    "spconv.utils": "CPU_ONLY_BUILD tv",
    "spconv.debug_utils": "SPCONV_DEBUG_SAVE_PATH",
    "spconv.build": "PACKAGE_NAME DISABLE_JIT",
}


@pytest.mark.parametrize("module", NAMES)
def test_names_that_users_import_from_where_upstream_has_them(sp, module):
    names = NAMES[module].split()
    code = f"from {module} import {', '.join(names)}"
    exec(code, {})
    assert sparse_bridge.status()["spconv"].enabled
