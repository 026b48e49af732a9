"""Models that `optimize` has changed, in compiled programs: the layers are in the graph as those of
the unchanged model."""

from __future__ import annotations

import pytest
import torch

import sparse_bridge
from tests.compile.comparison import assert_same, compare
from tests.compile.programs import APIS, PROGRAMS, scene
from tests.compile.test_fusion import fused
from tests.quick import quick
from tests.releases import WHOLE_GRAPHS

pytestmark = WHOLE_GRAPHS


@pytest.mark.parametrize("state", ("new", "watched"))
@pytest.mark.parametrize("api", quick(["spconv"], APIS))
def test_inference(api, state, plain_settings):
    with PROGRAMS[api]() as programs, torch.no_grad():
        program = programs["three"]().eval()
        expected = program(*scene(0))
        example = scene(1) if state == "watched" else ()
        sparse_bridge.optimize(program, *example)
        names = fused(program, *scene(0))
        assert names["conv_fused"] == 3 and not names["conv"], names
        assert_same(program(*scene(0)), expected)


@pytest.mark.sample(1)
@pytest.mark.parametrize("api", quick(["torchsparse"], ("spconv", "torchsparse", "minkowski")))
def test_training_and_any_rows(api, plain_settings):
    with PROGRAMS[api]() as programs:
        program = programs["three"]().eval()
        sparse_bridge.optimize(program, *scene(0))
        compare(program.train(), "eager", 3)


def test_export(plain_settings):
    with PROGRAMS["torchsparse"]() as programs, torch.no_grad():
        program = programs["three"]().eval()
        sparse_bridge.optimize(program, *scene(1))
        made = torch.export.export(program, scene(0))
        assert_same(made.module()(*scene(0)), program(*scene(0)))
