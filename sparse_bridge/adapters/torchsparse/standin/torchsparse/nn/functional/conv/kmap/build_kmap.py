"""Kernel maps from coordinates."""

from sparse_bridge.adapters.torchsparse import profile
from sparse_bridge.adapters.torchsparse.signatures import coords_arguments
from sparse_bridge.adapters.torchsparse.upstream import kmap as kernel_maps

__all__ = ["build_kernel_map", "convert_transposed_out_in_map", "transpose_kernel_map"]

_OLD = ("kernel_size", "stride", "tensor_stride", "mode")
_NEW = (
    "input_node_num",
    "kernel_size",
    "stride",
    "padding",
    "hashmap_keys",
    "hashmap_vals",
    "spatial_range",
    "mode",
    "dataflow",
    "downsample_mode",
    "training",
    "ifsort",
    "generative",
    "split_mask_num",
    "split_mask_num_bwd",
)
_USED = (
    "coords",
    "kernel_size",
    "stride",
    "tensor_stride",
    "padding",
    "spatial_range",
    "mode",
    "dataflow",
    "downsample_mode",
    "generative",
)


def build_kernel_map(*args, **kwargs):
    """2.0: (coords, kernel_size=2, stride=2, tensor_stride=1, mode="hashmap") -> (nbmaps, nbsizes,
    coords).  2.1: (coords, input_node_num, kernel_size=2, stride=2, padding=0, ...) -> dict.
    """
    names = _NEW if profile.current().divides else _OLD
    arguments = coords_arguments("build_kernel_map", names, args, kwargs)
    arguments = {"kernel_size": 2, "stride": 2, **arguments}
    used = {name: arguments[name] for name in _USED if name in arguments}
    return kernel_maps.build_kernel_map(**used)


def transpose_kernel_map(kmap, ifsort=False, training=False, split_mask_num=1, split_mask_num_bwd=1):
    """The same dict with the fields of the transposed layer (`..._t`) filled in."""
    if "out_in_map_t" not in kmap:
        kmap["out_in_map_t"] = kernel_maps.transposed_table(kmap["out_in_map"], kmap["sizes"][0])
    return kmap


def convert_transposed_out_in_map(out_in_map, size):
    """int32 [ceil(size / 128) * 128, V]: output row of every input row, -1 where absent."""
    return kernel_maps.transposed_table(out_in_map, size)
