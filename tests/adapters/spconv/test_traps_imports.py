"""Awkward uses in real projects: imports, versions, class identity."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

import sparse_bridge

from . import apis

ENABLE = "import sparse_bridge; sparse_bridge.enable('spconv', mode='standin')\n"


def test_version_parses_as_a_float_and_as_a_triple(standin):
    import spconv

    assert float(spconv.__version__[2:]) >= 2.2
    parts = spconv.__version__.split(".")
    assert len(parts) == 3 and [int(part) for part in parts] == spconv.SPCONV_VERSION_NUMBERS


def test_version_compares_as_a_string(standin):
    import spconv

    assert spconv.__version__ >= "2.0.0"


@pytest.mark.sample(0)
@pytest.mark.parametrize("late", [False, True])
def test_constants_are_assigned_before_or_after_the_layers_are_imported(late):
    lines = ["import spconv", "spconv.constants.SPCONV_USE_DIRECT_TABLE = False"]
    lines.insert(1 if late else 2, "import spconv.pytorch")
    code = ENABLE + "\n".join([*lines, "print(spconv.pytorch.ops.SPCONV_USE_DIRECT_TABLE)"])
    assert apis.python(code).split() == ["True" if late else "False"]


def test_find_spec_answers_before_and_after_the_import():
    code = (
        "from importlib.util import find_spec\n"
        "first = find_spec('spconv')\n"
        "import spconv\n"
        "print(first.name, first.origin == spconv.__file__, find_spec('spconv') is spconv.__spec__,"
        " find_spec('spconv.pytorch').name)"
    )
    assert apis.python(ENABLE + code).split() == ["spconv", "True", "True", "spconv.pytorch"]


def test_voxel_generator_probes_end_at_the_new_one(standin):
    with pytest.raises(ImportError):
        from spconv.utils import VoxelGeneratorV2  # noqa: F401
    with pytest.raises(ImportError):
        from spconv.utils import VoxelGenerator  # noqa: F401
    import cumm.tensorview as tv
    import numpy as np
    from spconv.utils import Point2VoxelCPU3d

    generator = Point2VoxelCPU3d(
        vsize_xyz=[1, 1, 1],
        coors_range_xyz=[0, 0, 0, 4, 4, 4],
        num_point_features=4,
        max_num_points_per_voxel=2,
        max_num_voxels=10,
    )
    points = np.array([[0.5, 1.5, 2.5, 9.0], [3.5, 1.5, 2.5, 8.0]], dtype=np.float32)
    voxels, coordinates, counts = generator.point_to_voxel(tv.from_numpy(points))
    assert coordinates.numpy().tolist() == [[2, 1, 0], [2, 1, 3]]
    assert voxels.numpy()[:, 0].tolist() == points.tolist()
    assert counts.numpy().tolist() == [1, 1]


def test_submodules_are_attributes(sp):
    assert issubclass(sp.SubMConv3d, sp.conv.SparseConvolution)
    assert sp.modules.is_spconv_module(sp.SubMConv3d(2, 2, 3))
    assert sp.ops.get_conv_output_size([9], [3], [2], [1], [1]) == [5]
    for name in ("conv", "core", "modules", "ops", "functional", "cppcore", "pool"):
        assert getattr(sp, name).__name__ == f"spconv.pytorch.{name}"


def test_one_class_object_per_name_however_often_enabled():
    with apis.standin() as first:
        layer = first.SubMConv3d
        assert isinstance(layer, type)
        with sparse_bridge.enable("spconv"):
            import spconv.pytorch as again

            assert again.SubMConv3d is layer
    with apis.standin() as second:
        assert second.SubMConv3d is layer
    wheel = apis.wheel()
    theirs = wheel.SubMConv3d
    with apis.patched() as patched:
        assert patched.SubMConv3d is theirs


def test_sparse_module_is_the_true_base_and_its_loading_can_be_replaced(sp, monkeypatch):
    """mmdetection3d moves the last axis first on everything that was saved by version 1."""
    base = sp.SparseModule
    for name in ("_load_from_state_dict", "_save_to_state_dict"):
        assert all(name not in vars(cls) for cls in (sp.conv.SparseConvolution, base))

    def load(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, local_metadata, True, [], [], errors)
        own = {**self._parameters, **self._buffers}
        for name, parameter in own.items():
            if parameter is not None:
                saved = state_dict[prefix + name]
                if local_metadata.get("version") != 2:
                    saved = saved.permute(-1, *range(saved.ndim - 1))
                parameter.data.copy_(saved)

    monkeypatch.setattr(base, "_version", 2, raising=False)
    monkeypatch.setattr(base, "_load_from_state_dict", load, raising=False)
    net = sp.SparseSequential(sp.SubMConv3d(3, 5, (1, 3, 3)), nn.ReLU())
    new = net.state_dict()
    assert new._metadata["0"]["version"] == 2
    old = OrderedDict((key, value.movedim(0, -1).clone()) for key, value in new.items())
    other = sp.SparseSequential(sp.SubMConv3d(3, 5, (1, 3, 3)), nn.ReLU())
    other.load_state_dict(old)
    torch.testing.assert_close(other[0].weight, net[0].weight)
    third = sp.SparseSequential(sp.SubMConv3d(3, 5, (1, 3, 3)), nn.ReLU())
    third.load_state_dict(new)
    torch.testing.assert_close(third[0].weight, net[0].weight)


def test_multiple_inheritance_with_either_init_first(sp):
    class Basic(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.conv1 = nn.Conv2d(width, width, 1)

    class SparseFirst(Basic, sp.SparseModule):
        def __init__(self):
            sp.SparseModule.__init__(self)
            Basic.__init__(self, 3)

    class BasicFirst(Basic, sp.SparseModule):
        def __init__(self):
            Basic.__init__(self, 3)
            self.after = sp.SubMConv3d(3, 3, 3)

    assert sp.modules.is_spconv_module(SparseFirst())
    assert [name for name, _ in SparseFirst().named_children()] == ["conv1"]
    assert set(dict(BasicFirst().named_children())) == {"conv1", "after"}


def test_forward_can_be_replaced_and_hooks_run(sp, monkeypatch):
    """Exporters replace `SparseConvolution.forward` and call `_conv_forward` themselves."""
    seen = []

    def forward(self, input, add_input=None):
        seen.append(type(self).__name__)
        return self._conv_forward(
            self.training,
            input,
            self.weight,
            self.bias,
            add_input,
            name=self.name,
            sparse_unique_name=self._sparse_unique_name,
            act_type=self.act_type,
            act_alpha=self.act_alpha,
            act_beta=self.act_beta,
        )

    net = sp.SparseSequential(sp.SubMConv3d(4, 4, 3), sp.SparseSequential(sp.SparseConv3d(4, 5, 2)))
    x = apis.tensor(sp)
    want = net(x).features
    monkeypatch.setattr(sp.conv.SparseConvolution, "forward", forward)
    net[0].register_forward_hook(lambda module, args, out: seen.append("hook"))
    torch.testing.assert_close(net(x).features, want)
    assert seen == ["SubMConv3d", "hook", "SparseConv3d"]


def test_import_inside_a_method(standin):
    class Wrapper:
        def __init__(self):
            import spconv.pytorch as spconv

            self.conv = spconv.SubMConv3d(2, 2, 3, algo=spconv.ConvAlgo.MaskImplicitGemm)

    assert isinstance(Wrapper().conv, standin.SubMConv3d)


@pytest.mark.slow
def test_environment_switches_of_projects_are_accepted():
    environment = {
        "SPCONV_ALGO": "native",
        "SPARSE_BACKEND": "spconv",
        "SPARSE_CONV_BACKEND": "spconv",
        "ATTN_BACKEND": "sdpa",
        "SPCONV_DEBUG_SAVE_PATH": "somewhere",
        "SPCONV_DO_SORT": "0",
        "SPCONV_SAVED_WEIGHT_LAYOUT": "KRSC",
    }
    code = ENABLE + (
        "import spconv.pytorch as sp, spconv.constants as c\n"
        "print(c.SPCONV_DO_SORT, c.SAVED_WEIGHT_LAYOUT, c.SPCONV_DEBUG_SAVE_PATH)"
    )
    assert apis.python(code, **environment).split() == ["False", "KRSC", "somewhere"]
