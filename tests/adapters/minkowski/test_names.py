"""Names and keywords of 0.5.4 that code calls by name."""

from __future__ import annotations

import importlib
import os
import pathlib

import pytest
import torch
from torch.nn.utils import prune

from sparse_bridge.adapters.minkowski import geometry
from sparse_bridge.adapters.minkowski.errors import ArgumentValueError
from sparse_bridge.errors import SparseBridgeError, UnsupportedError


@pytest.fixture
def field(ME):
    coords = torch.tensor([[0, 0.1, 0.2], [0, 1.5, 2.0], [1, 0, 0]])
    return ME.TensorField(torch.randn(3, 2), coords)


def test_maps_by_keyword(ME, field):
    manager, x = field.coordinate_manager, field.sparse()
    items, rows = manager.origin_field_map(key=field.coordinate_field_map_key)
    assert items.tolist() == [0, 1] and [part.tolist() for part in rows] == [[0, 1], [2]]
    items, rows = manager.origin_map(key=x.coordinate_map_key)
    assert items.tolist() == [0, 1] and [len(part) for part in rows] == [2, 1]


def test_forwards_by_keyword(ME, field):
    x = field.sparse()
    norm = ME.MinkowskiStableInstanceNorm(2)
    assert torch.equal(norm(x=x).F, norm(x).F)
    assert ME.MinkowskiToFeature()(x=x) is x.F and ME.MinkowskiToFeature()(x=field) is field.F
    with pytest.raises(AssertionError, match="MinkowskiToFeature"):
        ME.MinkowskiToFeature()(x=x.F)
    stack = ME.MinkowskiStackSum(ME.MinkowskiReLU(), ME.MinkowskiReLU())
    assert torch.equal(stack(x=x).F, 2 * x.F.relu())
    channels = ME.MinkowskiChannelwiseConvolution(2, 3, dimension=2)
    assert channels.kernel_shape == (9, 2) == tuple(channels.kernel.shape)


def test_means_of_listed_rows(ME):
    spmm_average = importlib.import_module("MinkowskiEngine.sparse_matrix_functions").spmm_average
    rows, cols = torch.tensor([2, 0, 2]).int(), torch.tensor([1, 0, 0]).int()
    mat = torch.tensor([[1.0, 2.0], [3.0, 6.0]], dtype=torch.float64, requires_grad=True)
    out, coo, vals = spmm_average(rows, cols, torch.Size([3, 2]), mat)
    assert out.tolist() == [[1, 2], [0, 0], [2, 4]]
    assert coo.tolist() == [[0, 2, 2], [0, 1, 0]] and vals.tolist() == [1, 0.5, 0.5]
    assert torch.equal(ME.spmm(coo[0], coo[1], vals, [3, 2], mat), out)
    assert torch.autograd.gradcheck(lambda m: spmm_average(rows, cols, [3, 2], m)[0], (mat,))


def test_the_text_of_a_summary(ME, field, capsys):
    module = importlib.import_module("MinkowskiEngine.utils.summary")
    net = torch.nn.Sequential(ME.MinkowskiLinear(2, 3), ME.MinkowskiReLU())
    text, counts = module.minkowski_summary_string(net, field)
    assert "ReLU" in text and counts == (9, 9) and not capsys.readouterr().out
    assert module.summary(net, field) == counts and capsys.readouterr().out == text + "\n"


def test_numbers_per_axis(ME):
    """Whole numbers, also without an axis; nothing is cut off."""
    as_list = ME.convert_to_int_list
    for value in (2, 2.0, torch.tensor(2), torch.tensor(2.0)):
        assert as_list(value, 3) == [2, 2, 2]
    assert as_list(torch.tensor([1, 2]), 2) == [1, 2] == as_list((1, 2.0), 2)
    for value in (2.5, [1, 0.5], float("nan"), [1, float("inf")], torch.tensor(1.5), [1, "a"], [1, "2"]):
        with pytest.raises(ArgumentValueError, match="whole number"):
            geometry.int_list(value, 2)
    with pytest.raises(ArgumentValueError, match="whole number"):
        ME.MinkowskiConvolution(1, 1, kernel_size=2.5, dimension=2)


def test_names_of_managers_and_modes(ME):
    managers = importlib.import_module("MinkowskiEngine.MinkowskiCoordinateManager")
    assert managers.CoordsManager is ME.CoordsManager and os.cpu_count() == managers.CPU_COUNT
    backend = importlib.import_module("MinkowskiEngineBackend._C")
    assert backend.DIRECT_GEMM is backend.ConvolutionMode.DIRECT_GEMM
    assert backend.COPY_GEMM is backend.ConvolutionMode.COPY_GEMM
    assert backend.DEFAULT is ME.MinkowskiAlgorithm.DEFAULT  # two enumerations have one
    region = ME.KernelRegion(3, 1, 1, ME.RegionType.HYPER_CUBE, None, dimension=2)
    assert region.dimension == 2 and region._fields[-1] == "dimension"


def test_the_folder_of_the_package(ME):
    assert (pathlib.Path(ME.file_dir) / "__init__.py").samefile(ME.__file__)


def test_concatenation_is_a_broadcast(ME, field):
    x = field.sparse()
    glob = ME.MinkowskiGlobalSumPooling()(x)
    joined = ME.MinkowskiBroadcastConcatenation()(x, glob)
    assert issubclass(ME.MinkowskiBroadcastConcatenation, ME.MinkowskiBroadcast)
    assert torch.equal(joined.F, torch.cat([x.F, ME.MinkowskiBroadcast()(x, glob).F], 1))


def test_channelwise_weights_start_alike_transposed_or_not(ME):
    layer = ME.MinkowskiChannelwiseConvolution(4, 3, bias=True, dimension=2)
    made = []
    for given in ((), (False,), (True,)):
        torch.manual_seed(0)
        layer.reset_parameters(*given)
        made.append(torch.cat([layer.kernel, layer.bias]).detach().clone())
        assert 0.1 < made[-1].abs().max() <= 1 / 6
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])


def test_the_epsilon_of_a_stable_norm(ME, field):
    x, norm = field.sparse(), ME.MinkowskiStableInstanceNorm(2)
    assert norm.eps == 1e-6

    def wanted():
        items = [x.F[:2], x.F[2:]]
        parts = [(f - f.mean(0)) / (f.var(0, correction=0) + norm.eps).sqrt() for f in items]
        return torch.cat(parts)

    torch.testing.assert_close(norm(x).F, wanted())
    norm.eps = 0.5
    torch.testing.assert_close(norm(x).F, wanted())


def test_a_check_of_gradients_takes_its_switches_in_order(ME):
    check = ME.utils.gradcheck.gradcheck
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)

    class Needing(torch.autograd.Function):
        """Its gradient fails where no gradient comes in."""

        @staticmethod
        def forward(ctx, x):
            ctx.set_materialize_grads(False)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    assert check(torch.sin, (x,), 1e-6, 1e-5, 1e-3, True, False, 0.0, True, False)
    assert check(Needing, (x,), 1e-6, 1e-5, 1e-3, True, False, 0.0, False)
    with pytest.raises((TypeError, RuntimeError)):
        check(Needing, (x,), 1e-6, 1e-5, 1e-3, True, False, 0.0, True)
    assert check(lambda x: x.sin().float(), (x,), 1e-3, 1e-2, 1e-2)
    with pytest.raises(RuntimeError):
        check(lambda x: x.sin(), (x.detach().float().requires_grad_(),), check_grad_dtypes=True)


SMI = """#!/bin/sh
cat <<'END'

==============NVSMI LOG==============

Timestamp                                 : Mon Nov 23 10:00:00 2026
Driver Version                            : 580.65.06
CUDA Version                              : 13.0

Attached GPUs                             : 2
GPU 00000000:17:00.0
    Product Name                          : NVIDIA H100
    Clocks
        Graphics                          : 1980 MHz
GPU 00000000:65:00.0
    Product Name                          : NVIDIA T4
END
exit ${SMI_CODE:-0}
"""


def test_what_the_driver_says(ME, tmp_path, monkeypatch, capsys):
    module = importlib.import_module("MinkowskiEngine.diagnostics")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert module.parse_nvidia_smi() == {}
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    said = module.parse_nvidia_smi()
    assert said["Driver Version"] == "580.65.06" and said["Product Name"] == "NVIDIA H100"
    assert said["Timestamp"] == "Mon Nov 23 10:00:00 2026" and "Clocks" not in said
    ME.print_diagnostics()
    assert "CUDA Version: 13.0" in capsys.readouterr().out
    monkeypatch.setenv("SMI_CODE", "9")
    assert module.parse_nvidia_smi() == {}


def test_pruned_weights_are_counted(ME, field):
    module = importlib.import_module("MinkowskiEngine.utils.summary")
    conv = ME.MinkowskiConvolution(2, 4, kernel_size=3, bias=True, dimension=2)
    assert module.pruned_weight_sparsity_string(conv) == ""
    assert module.pruned_weight_sparsity_string(torch.nn.BatchNorm1d(3)) == ""
    prune.random_unstructured(conv, "kernel", amount=0.25)
    assert module.pruned_weight_sparsity_string(conv) == "kernel 25.0% pruned"
    prune.random_unstructured(conv, "bias", amount=2)
    text = module.pruned_weight_sparsity_string(conv)
    assert text == "kernel 25.0% pruned, bias 50.0% pruned"
    table, _ = module.minkowski_summary_string(torch.nn.Sequential(conv), field.sparse())
    assert table.splitlines()[1].endswith(f"76 {text}")
    assert module.size2list(torch.Size([3, 4])) == [3, 4]
    with pytest.raises(UnsupportedError, match="get_hash_occupancy_ratio"):
        module.get_hash_occupancy_ratio(field)


def test_a_summary_of_dense_layers(ME, capsys):
    module = importlib.import_module("MinkowskiEngine.utils.torchsummary")
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(4 * 6 * 4, 5)
    )
    net[1].eval(), net[3].requires_grad_(False)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    text, counts = module.summary_string(net, (3, 8, 6))
    assert "[-1, 4, 6, 4]" in text and "[-1, 5]" in text.splitlines()[4]
    assert counts == (3 * 4 * 9 + 4 + 8 + 96 * 5 + 5, 3 * 4 * 9 + 4 + 8)
    assert module.summary(net, [(3, 8, 6)], batch_size=7, device="cpu") == counts
    assert "[7, 4, 6, 4]" in capsys.readouterr().out
    assert [m.training for m in net] == [True, False, True, True] and net.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())

    class Pair(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.joined = torch.nn.Embedding(2, 3), torch.nn.Identity()

        def forward(self, rows, x):
            return self.joined((self.table(rows), x))

    text, _ = module.summary_string(Pair(), [(4,), (5,)], 1, dtypes=[torch.long, torch.float64])
    assert "[[1, 4, 3], [1, 5]]" in text
    with pytest.raises(ValueError, match="zip"):
        module.summary_string(Pair(), [(4,), (5,)], dtypes=[torch.long])


def test_functions_of_the_compiled_module_are_refused_by_name(ME, field):
    common = importlib.import_module("MinkowskiEngine.MinkowskiCommon")
    with pytest.raises(SparseBridgeError, match="ConvolutionForwardCPU is not available"):
        common.get_minkowski_function("ConvolutionForward", field.F)
