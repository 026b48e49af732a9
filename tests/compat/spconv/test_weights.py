"""Checkpoints of older spconv versions, loaded into models as projects load them."""

from __future__ import annotations

import logging
from collections import OrderedDict

import pytest
import torch

from sparse_bridge import log
from tests.adapters.spconv.test_errors import SAVED

from .small import blob, module_of

SCENE = blob((48, 40, 41), 4)
OPTIONS = {
    "second": {"grid_size": (48, 40, 40)},
    "mmdet3d_encoder": {"sparse_shape": (41, 40, 48)},
    "mmdet3d_unet": {"sparse_shape": (41, 40, 48)},
}


def network(name, seed):
    """A model file's network in eval mode, with weights of a seed."""
    torch.manual_seed(seed)
    return module_of(name).build(**OPTIONS[name]).eval()


def answer(name, model):
    module = module_of(name)
    with torch.no_grad():
        return module.outputs(model(*module.batch(SCENE, "cpu", torch.float32)))


def stored(model, layout):
    """The state of a model as an older version would have saved it, without version notes."""
    return OrderedDict(
        (key, SAVED[layout](value) if value.dim() == 5 else value.clone()) for key, value in model.state_dict().items()
    )


def assert_same(got, want):
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("layout", SAVED)
def test_a_whole_detector_loads_once_its_layout_is_named(library, layout, monkeypatch, caplog):
    import spconv

    want = network("second", 0)
    old, fresh = stored(want, layout), network("second", 1)
    log.reset()
    with caplog.at_level(logging.INFO, "sparse_bridge"):
        with pytest.raises(RuntimeError, match=f"SPCONV_SAVED_WEIGHT_LAYOUT={layout} (?s:.*)size mismatch"):
            fresh.load_state_dict(OrderedDict(old))
        monkeypatch.setattr(spconv.constants, "SAVED_WEIGHT_LAYOUT", layout)
        fresh.load_state_dict(OrderedDict(old))
    assert f"layout {layout} is converted to KRSC" in caplog.text
    assert_same(answer("second", fresh), answer("second", want))


def test_weights_of_today_load_without_a_word(library, monkeypatch, caplog):
    want, fresh = network("second", 0), network("second", 1)
    log.reset()
    with caplog.at_level(logging.INFO, "sparse_bridge"):
        fresh.load_state_dict(want.state_dict())
    assert caplog.text == ""
    assert_same(answer("second", fresh), answer("second", want))


def test_openpcdet_finds_the_layout_by_shape(library):
    """Its own loader exchanges axes until shapes agree."""
    want, fresh = network("second", 0), network("second", 1)
    old = stored(want, "RSCK")
    keys = module_of("pcdet_utils").find_all_spconv_keys(want)
    assert len(keys) == 12 and keys <= set(old)
    assert len(fresh.load_from_disk(old)) == len(want.state_dict())
    assert_same(answer("second", fresh), answer("second", want))
    assert fresh.load_from_disk(want.state_dict(), strict=False)


@pytest.fixture
def mmdet3d(library, monkeypatch):
    """mmdetection3d's registration in force, undone afterwards."""
    ops = module_of("mmdet3d_ops")
    for name in ("_version", "_load_from_state_dict"):
        monkeypatch.setattr(library.SparseModule, name, None, raising=False)
    ops.register_spconv2()
    return ops


@pytest.mark.parametrize("name", ["mmdet3d_encoder", "mmdet3d_unet"])
def test_mmdet3d_moves_the_axes_of_older_weights(mmdet3d, name):
    want, fresh = network(name, 0), network(name, 1)
    fresh.load_state_dict(stored(want, "RSCK"))
    assert_same(answer(name, fresh), answer(name, want))
    again, state = network(name, 2), want.state_dict()
    assert {state._metadata[key]["version"] for key in ("conv_input", "conv_input.0")} == {2}
    again.load_state_dict(state)
    assert_same(answer(name, again), answer(name, want))


def test_mmdet3d_reports_what_does_not_fit(mmdet3d):
    state = network("mmdet3d_encoder", 0).state_dict()
    del state["conv_out.0.weight"]
    state["conv_out.0.surplus"] = torch.zeros(1)
    state["conv_input.0.weight"] = torch.zeros(16, 3, 3, 3, 5)
    with pytest.raises(RuntimeError) as caught:
        network("mmdet3d_encoder", 1).load_state_dict(state)
    text = str(caught.value)
    assert "conv_out.0.weight" in text and "surplus" in text and "size mismatch" in text


def test_registered_layers_are_the_librarys_classes(mmdet3d, library):
    for name in ("SubMConv3d", "SparseConv3d", "SparseInverseConv3d", "SparseConvTranspose3d"):
        assert mmdet3d.MODELS.module_dict[name] is getattr(library, name)
    with pytest.raises(KeyError, match="already registered"):
        mmdet3d.MODELS._register_module(library.SubMConv3d)
    layer = mmdet3d.MODELS.build({"type": "SubMConv2d", "indice_key": "k"}, 3, 4, 3, bias=False)
    assert isinstance(layer, library.SparseModule) and layer.weight.shape == (4, 3, 3, 3)
    block = mmdet3d.SparseBasicBlock(4, 4)
    assert library.modules.is_spconv_module(block) and block.norm1 is block.bn1


def test_saving_can_be_taken_over(mmdet3d, library, monkeypatch):
    """SST replaces `_save_to_state_dict` of every sparse module."""
    plain = network("mmdet3d_encoder", 0).state_dict()
    seen = []
    save = torch.nn.Module._save_to_state_dict

    def counted(self, *arguments):
        seen.append(type(self).__name__)
        save(self, *arguments)

    monkeypatch.setattr(library.SparseModule, "_save_to_state_dict", counted, raising=False)
    assert list(network("mmdet3d_encoder", 0).state_dict()) == list(plain)
    assert seen.count("SubMConv3d") == 8 and seen.count("SparseConv3d") == 4
    monkeypatch.undo()
    sst = module_of("sst")
    monkeypatch.setattr(library.SparseModule, "_save_to_state_dict", sst._save_to_state_dict, raising=False)
    assert list(network("mmdet3d_encoder", 0).state_dict()) == list(plain)
