"""Kernels without a GPU: part of the suite again, in Triton's interpreter and on emulated AMD GPUs.

Each lane is a process of its own. A quick part runs by default; `pytest tests/lanes -m slow`
runs the whole of it on all architectures (minutes each). By hand, any test that takes a `lane`:

    TRITON_INTERPRET=1 python -m pytest tests/core tests/kernels tests/emulated
    SPARSE_BRIDGE_TEST_ARCH=gfx942 python -m pytest tests/core
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re

import pytest

from sparse_bridge.tools.harness.processes import Child
from tests.conftest import EMULATED, INTERPRETED
from tests.releases import triton_since

ROOT = pathlib.Path(__file__).parents[2]
_PATIENCE = 4 * 3600.0  # seconds
HERE = pytest.mark.skipif(INTERPRETED or bool(EMULATED), reason="this is a lane already")
KERNELS = [
    "tests/kernels/test_hash_table.py",
    "tests/kernels/test_neighbor_table.py::test_look_up",
    "tests/kernels/test_mask_order.py::test_tiles",
    "tests/kernels/test_gemm.py::test_rows_around_the_tile",
    "tests/kernels/test_gemm.py::test_lists_of_the_wgrad",
    "tests/kernels/test_pooling.py",
    "tests/kernels/test_segment_sums.py",
    "tests/kernels/test_batch_norm.py",
    "tests/core/test_batch_norm.py",
    "tests/core/test_voxel.py",
    "tests/core/test_key_search.py",
    "tests/kernels/test_grouped.py",
    "tests/kernels/test_mask_splits.py::test_tiles",
    "tests/kernels/test_mask_splits.py::test_epilogues_follow_the_whole_sum",
    "tests/kernels/test_narrow.py::test_offsets_around_the_step",
    "tests/kernels/test_row_ranks.py",
    "tests/kernels/test_package_kernels.py",
]
ARCHS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
CONV = (
    "every_kind_and_dimension",
    "kernel_shapes",
    "crowded_scenes",
    "dtypes",
    "half_precision_with_odd_channels",
    "ieee_where_tf32_is_not_allowed",
    "groups",
    "row_counts_around_the_tile",
    "empty_batch_items",
)
EDGES = ("repeated_coordinates", "repeated_coordinates_under_other_kernels")
WHOLE = [
    "tests/kernels/test_grouped.py",
    "tests/core/ops/test_relational.py",
    "tests/kernels/test_hash_table.py",
    "tests/kernels/test_neighbor_table.py",
    "tests/kernels/test_row_ranks.py",
    "tests/kernels/test_mask_order.py",
    "tests/kernels/test_pair_batch.py",
    "tests/kernels/test_gemm.py",
    "tests/kernels/test_narrow.py",
    "tests/kernels/test_mask_splits.py",
    "tests/core/conv/test_mask_splits.py",
    "tests/core/conv/test_memory_limit.py",
    "tests/kernels/test_pooling.py",
    "tests/kernels/test_segment_sums.py",
    "tests/kernels/test_batch_norm.py",
    "tests/core/test_batch_norm.py",
    "tests/robustness/test_one_answer.py",
    "tests/adapters/spconv/test_fused_training.py",
    "tests/adapters/spconv/test_row_order.py",
    "tests/adapters/spconv/test_trained_norms.py",
    "tests/adapters/test_training_norms.py",
    "tests/adapters/test_pointwise_norms.py",
    "tests/compile/test_pointwise.py",
    "tests/core/test_maps.py",
    "tests/core/test_sorted_order.py",
    "tests/core/prefetch/test_prefetch.py",
    "tests/core/prefetch/test_new_shapes.py",
    "tests/core/prefetch/test_waits.py",
    "tests/core/capture/test_padded.py",
    "tests/core/capture/test_replay_apis.py",
    "tests/core/capture/test_programs.py",
    "tests/core/capture/test_trials.py",
    "tests/core/capture/test_wrappers.py",
    "tests/core/capture/test_random_streams.py",
    "tests/core/capture/test_stream_order.py",
    "tests/core/capture/test_shared_inputs.py",
    "tests/core/capture/test_same_networks.py",
    "tests/core/capture/test_graph_maps.py",
    "tests/core/capture/test_bounded_captures.py",
    "tests/core/capture/test_announced_inputs.py",
    "tests/core/prefetch/test_ordered_rows.py",
    "tests/core/capture/test_unknown_bounds.py",
    "tests/core/prefetch/test_unknown_bounds.py",
    "tests/core/test_impulse.py",
    "tests/core/test_pool.py",
    "tests/core/test_voxel.py",
    "tests/core/test_key_search.py",
    "tests/core/test_row_matrix.py",
    "tests/core/test_channelwise.py",
    "tests/core/test_self_check.py",
    "tests/core/test_residual.py",
    *(f"tests/core/test_conv.py::test_{name}" for name in CONV),
    *(f"tests/core/test_conv_edges.py::test_{name}" for name in EDGES),
    "tests/adapters/flex_gemm/test_goldens.py",
    "tests/adapters/flex_gemm/test_sampling_codes.py",
    "tests/emulated/test_networks.py",
    "tests/emulated/test_schedules.py",
    "tests/emulated/test_shapes.py",
    "tests/emulated/test_buffer_operations.py",
    "tests/kernels/test_far_tensors.py",
    "tests/acceptance/test_acceptance.py::test_an_emulated_gpu_passes",
]

# Recorded answers of the frameworks: nodes, and how many tests they hold at least.
GOLDENS = {
    "spconv": (["tests/emulated/test_networks.py::test_recorded_layers_of_spconv"], 1),
    "torchsparse": (["tests/emulated/test_networks.py::test_recorded_layers_of_torchsparse"], 2),
    "minkowski": (["tests/adapters/minkowski/test_goldens.py"], 1),
    "flex_gemm": (["tests/adapters/flex_gemm/test_goldens.py"], 97),
}


def convolutions(lane):
    """Forward and backward: every kind in two dimensions, fp16, groups, repeated rows."""
    conv, edges = "tests/core/test_conv.py", "tests/core/test_conv_edges.py"
    kinds = ("submanifold", "strided", "generative", "inverse", "between")
    nodes = [f"{conv}::test_every_kind_and_dimension[{lane}-masked-{kind}-2]" for kind in kinds]
    nodes += [
        f"{conv}::test_every_kind_and_dimension[{lane}-unmasked-submanifold-2]",
        f"{conv}::test_groups[{lane}-masked-submanifold-2-32-64]",
        f"{conv}::test_half_precision_with_odd_channels[{lane}-masked-torch.float16]",
        f"{edges}::test_repeated_coordinates[{lane}-masked-submanifold]",
    ]
    return nodes


def networks(lane, *names):
    """Small networks, one of each framework, and the self-check of the device."""
    file = "tests/emulated/test_networks.py::test_network"
    check = "tests/core/test_self_check.py::TestOnKernels::test_everything_passes"
    return [f"{check}[{lane}-masked]", *(f"{file}[{lane}-masked-{name}]" for name in names)]


# What only kernels and graphs do, and no test on a CPU: a replay, norms in training, a prefetched scene.
REPLAYS = [
    "tests/core/capture/test_graph_maps.py::test_a_graph_is_queued_before_the_modules_are_looked_at",
    # Minutes in the interpreter, seconds here.
    "tests/core/prefetch/test_prefetch.py::test_the_third_scene_is_prefetched",
    "tests/core/test_batch_norm.py::test_three_steps",
    "tests/adapters/spconv/test_trained_norms.py::test_steps",
]


def emulated(arch):
    """The hash table, a convolution and a network, forward and backward, as machine code of that
    GPU, and one problem under shuffled schedules."""
    schedules = f"test_layers[{arch}-masked-submanifold-3-torch.float16]"
    return [
        KERNELS[0],
        *convolutions(arch),
        *networks(arch, SMALL[1]),
        "tests/core/test_self_check.py::TestFallbacks",
        "tests/core/ops/test_relational.py::test_means_and_sums",
        "tests/kernels/test_pooling.py::test_the_first_largest_row_of_segments",
        "tests/kernels/test_segment_sums.py::test_a_segment_does_not_see_the_others",
        "tests/core/conv/test_mask_splits.py::test_a_module_takes_them",
        "tests/core/conv/test_memory_limit.py::test_blocks_have_the_bits_of_the_whole",
        "tests/core/conv/test_memory_limit.py::test_a_kernel_without_a_table",
        "tests/kernels/test_pair_batch.py",
        "tests/kernels/test_row_ranks.py::test_rows_in_use",
        "tests/adapters/test_pointwise_norms.py",
        "tests/compile/test_pointwise.py",
        f"tests/emulated/test_schedules.py::{schedules}",
    ]


SMALL = ("spconv-prog_unet_k3_head", "torchsparse-p21_unet_b2", "minkowski-net_dense_decoder")


# The quick lane of the interpreter in parts that can run side by side, of no less than a dozen
# seconds each, as a process takes some to start: nodes, and how many tests they hold at least.
QUICK = {
    "hash table": (KERNELS[:1], 30),
    "maps and convolutions": (KERNELS[1:3] + convolutions("interpreter"), 39),
    "products": (KERNELS[3:5] + KERNELS[11:12], 55),
    "pools": (KERNELS[5:7], 40),
    "norms": (KERNELS[7:9], 60),
    "keys and sorted rows": (KERNELS[9:11] + KERNELS[15:], 200),
    "mask splits": (KERNELS[12:14], 30),
    "narrow inputs": (KERNELS[14:15], 14),
    "launches": (["tests/offline_compile/test_launches.py"], 5),
}


@pytest.fixture
def run(tmp_path):
    """The nodes pass in a process with `environment`, and no fewer than `at_least` of them ran;
    how many did."""

    def ran(nodes, at_least, **environment):
        log = tmp_path / "log.txt"
        variables = {**os.environ, "PYTEST_ADDOPTS": "", **environment}
        child = Child("tests.lanes.worker", nodes, variables, log)
        try:
            answer = child.receive(_PATIENCE) or {"status": child.ending()}
        finally:
            child.end()
        shown = log.read_text(encoding="utf-8", errors="replace")[-8000:]
        assert answer["status"] == 0, (answer["status"], shown)
        assert answer["passed"] >= at_least, shown
        return answer["passed"]

    return ran


interpreters = triton_since(3, 4, "the interpreter lacks types, and aborts in the hash table")

# Fifteen seconds and more each; much of them runs on the emulator as well.
LONG = (
    "keys and sorted rows",
    "maps and convolutions",
    "launches",
    "pools",
    "norms",
    "hash table",
    "mask splits",
    "narrow inputs",
    "products",
)


@HERE
@interpreters
@pytest.mark.parametrize("part", [pytest.param(one, marks=[pytest.mark.slow] * (one in LONG)) for one in QUICK])
def test_interpreter(run, part):
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    nodes, at_least = QUICK[part]
    run(nodes, at_least, TRITON_INTERPRET="1")


def test_every_node_is_there():
    recorded = [node for nodes, _ in GOLDENS.values() for node in nodes]
    for node in {*KERNELS, *REPLAYS, *WHOLE, *recorded, *emulated("a"), *networks("a", *SMALL)}:
        path, *names = node.partition("[")[0].split("::")
        source = (ROOT / path).read_text(encoding="utf-8")
        missing = [name for name in names if not re.search(rf"(def|class) {name}\b", source)]
        assert not missing, node


def test_the_parts_of_the_quick_lane_are_the_whole_of_it():
    named = [node for nodes, _ in QUICK.values() for node in nodes]
    assert sorted(named) == sorted([*KERNELS, *convolutions("interpreter"), "tests/offline_compile/test_launches.py"])


@HERE
@interpreters
@pytest.mark.slow
def test_networks_in_the_interpreter(run):
    """Whole networks of all three frameworks, forward and backward, along the launch path."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    run(networks("interpreter", *SMALL), 4, TRITON_INTERPRET="1")


needs_emulator = pytest.mark.skipif(
    importlib.util.find_spec("tinygrad") is None or importlib.util.find_spec("triton") is None,
    reason="the emulator needs Triton and the extra `emulator`",
)


@HERE
@pytest.mark.emulated
@needs_emulator
@triton_since(3, 5, "no linker for AMD's code comes along")
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
def test_replays_on_an_emulated_gpu(run, arch):
    run(REPLAYS, 19, SPARSE_BRIDGE_TEST_ARCH=arch)


@HERE
@pytest.mark.slow
@pytest.mark.emulated
@needs_emulator
@triton_since(3, 5, "no linker for AMD's code comes along")
@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
def test_emulated_gpu(run, arch):
    run(emulated(arch), 155, SPARSE_BRIDGE_TEST_ARCH=arch)


@HERE
@pytest.mark.slow
@pytest.mark.emulated
@needs_emulator
@triton_since(3, 5, "no linker for AMD's code comes along")
@pytest.mark.parametrize("arch", ARCHS)
def test_the_whole_of_an_emulated_gpu(run, arch, record_property):
    """Every kernel and map builder, every dtype, networks of all frameworks; bounds checks are on
    and many schedules are tried."""
    record_property("cases", run(WHOLE, 700, SPARSE_BRIDGE_TEST_ARCH=arch))


@HERE
@pytest.mark.slow
@pytest.mark.emulated
@needs_emulator
@triton_since(3, 5, "no linker for AMD's code comes along")
@pytest.mark.parametrize("framework", GOLDENS)
@pytest.mark.parametrize("arch", ARCHS)
def test_goldens_of_every_framework(run, arch, framework):
    """The frameworks' recorded answers from the machine code of that GPU."""
    nodes, at_least = GOLDENS[framework]
    run([*nodes, "--slow"], at_least, SPARSE_BRIDGE_TEST_ARCH=arch)
