"""Codes of voxels along space-filling curves."""

from sparse_bridge.adapters.flex_gemm.serialize import decode_seq, encode_seq

__all__ = ["decode_seq", "encode_seq"]
