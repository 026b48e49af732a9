"""What the pages of torchsparse, MinkowskiEngine and FlexGEMM say differs here: the tests that hold
each line of them. (Their originals run on no machine of ours; spconv's table is run in both modes.)
"""

from __future__ import annotations

import re

import pytest

from tests.docs import pages

FOLDER = pages.ROOT / "tests" / "adapters"
TORCHSPARSE = {
    "every device, fp16": ("test_lanes::test_values test_training::test_half_precision_decides_in_2_1"),
    "autocast decides the dtype": "test_training::test_autocast",
    "`spvoxelize` under autocast": "test_training::test_autocast_of_points",
    "backward works for layers in `eval()`": "test_differences::test_backward_in_eval",
    "a map belongs to its coordinates": (
        "test_caches::test_other_sites_at_the_same_stride_get_a_map_of_their_own "
        "test_caches::test_coordinates_changed_in_place"
    ),
    "a second strided layer": "test_differences::test_a_second_strided_layer_of_the_same_key",
    "a transposed layer checks": "test_caches::test_transposed_refuses_other_rows",
    "a transposed layer back": "test_caches::test_a_raw_input_needs_no_registration",
    "negative coordinates work": "test_conv::test_negative_coordinates_with_stride",
    "`spatial_range` limits": ("test_caches::test_ranges_that_the_rows_leave test_tensors::test_dense_of_bad_tensors"),
    "keys are exact": "test_conv::test_far_apart",
    "no rows": "test_conv::test_row_counts test_norms_pools::test_pools_of_missing_items",
    "`spdevoxelize` backward": "test_points::test_voxels_and_points_of_a_layer",
    "an index outside": "test_points::test_indices_outside_of_the_rows",
    "`GroupNorm`": "test_norms_pools::test_group_norm",
    "bird's-eye-view layers": (
        "test_norms_pools::test_dense_bev_convolution test_norms_pools::test_height_compression"
    ),
    "`sphash` under 2.1": "test_points::test_hash_layout",
    "channels of any number": "test_differences::test_voxels_of_many_channels",
    "importing `torchsparse.backends`": (
        "test_profiles::test_importing_wakes_no_gpu_and_imports_no_triton test_tensors::test_switches"
    ),
    "`fp32` follows": "test_differences::test_whose_switch_allows_tf32",
}
FLEX_GEMM = {
    "fp32 products on NVIDIA": "test_convolutions::test_the_tf32_switch",
    "CPU tensors, fp64": (
        "test_convolutions::test_any_channels_and_dtypes test_convolutions::test_submanifold_with_every_gradient"
    ),
    "no bias, a frozen weight": (
        "test_documented_programs::test_channels_dtypes_and_frozen_parts "
        "test_convolutions::test_few_rows "
        "test_sampling_codes::test_nothing_to_sample"
    ),
    "cache made without gradients": ("test_differences::test_caches_made_without_gradients_or_by_another_algorithm"),
    "inputs that are not contiguous": (
        "test_convolutions::test_inputs_need_not_be_contiguous test_sampling_codes::test_points_of_any_layout"
    ),
    "voxels outside the shape": "test_convolutions::test_equal_rows_and_rows_outside",
    "equal voxels": "test_convolutions::test_equal_rows_and_rows_outside",
    "repeated output coordinates": ("test_convolutions::test_given_outputs_may_repeat_and_lie_outside"),
    "first trilinear gradient": (
        "test_sampling_codes::test_points test_sampling_codes::test_points_that_are_no_points"
    ),
    "Z-order codes": "test_sampling_codes::test_codes_of_any_layout_and_high_batches",
    "gradients of sampling": "test_differences::test_gradients_of_sampling_repeat",
    "even submanifold kernels": (
        "test_convolutions::test_bad_input_has_one_clear_error test_convolutions::test_one_that_does_not_fit"
    ),
}
MINKOWSKI = {
    "fp16 and bf16": "test_behaviour::test_autocast test_behaviour::test_half_precision_networks",
    "Empty tensors": ("test_layers::test_empty_tensors test_layers::test_a_pruned_item_keeps_its_place"),
    "`deepcopy` and `pickle`": "test_tensors::test_tensors_and_modules_copy_and_pickle",
    "Coordinates over the whole range": "test_convolutions::test_far_coordinates",
    "Global pooling and broadcast": (
        "test_layers::test_global_pools_and_broadcasts_with_gaps "
        "test_layers::test_the_global_pooling_function_of_a_field"
    ),
    "Maxima are true maxima": ("test_layers::test_local_pools test_layers::test_max_gradient_goes_to_one_row"),
    "`slice`, `cat_slice`": (
        "test_fields::test_points_come_back_from_every_level "
        "test_tensors::test_sparse_leaves_the_tensor_alone "
        "test_utils::test_labels"
    ),
    "Output coordinates given as a tensor": ("test_convolutions::test_output_coordinates_of_every_kind"),
    "`SparseTensor(..., quantization_mode": "test_tensors::test_duplicates",
    "`dense()` raises": "test_tensors::test_dense",
    "`features_at`, `coordinates_at`": (
        "test_manager::test_items_from_the_end_and_beyond test_old_answers::test_items_at_an_index"
    ),
    "`sparse_quantize(x, labels=labels, return_maps_only=True)`": (
        "test_utils::test_labels_and_maps_alone "
        "test_utils::test_sizes_without_axes_are_numbers "
        "test_utils::test_collation_refuses_coordinates_that_do_not_fit"
    ),
}


def torchsparse():
    rows = pages.table(pages.ROOT / "docs/torchsparse.md", "| Here | torchsparse | Why |")
    return [row[0] for row in rows]


def flex_gemm():
    rows = pages.table(pages.ROOT / "docs/flex_gemm.md", "| situation | FlexGEMM | here |")
    return [row[0] for row in rows]


def minkowski():
    page = (pages.ROOT / "docs/minkowski.md").read_text(encoding="utf-8")
    better = page.partition("Better than upstream:\n")[2].partition("\n\nKept although")[0]
    return re.findall(r"^\* (.*)", better, re.M)


PAGES = {
    "torchsparse": (torchsparse, TORCHSPARSE),
    "flex_gemm": (flex_gemm, FLEX_GEMM),
    "minkowski": (minkowski, MINKOWSKI),
}


@pytest.mark.parametrize("framework", PAGES)
def test_every_line_has_its_tests(framework):
    lines, held = PAGES[framework]
    found = {line: [name for name in held if line.startswith(name)] for line in lines()}
    assert {line for line, names in found.items() if len(names) != 1} == set()
    assert sorted(name for names in found.values() for name in names) == sorted(held)
    for nodes in held.values():
        for node in nodes.split():
            file, _, name = node.partition("::")
            source = (FOLDER / framework / f"{file}.py").read_text(encoding="utf-8")
            assert f"def {name}(" in source, node
