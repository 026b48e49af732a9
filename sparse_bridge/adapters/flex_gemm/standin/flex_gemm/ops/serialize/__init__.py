"""Codes of voxels along space-filling curves."""

from sparse_bridge.adapters.flex_gemm.codes import decode_seq, encode_seq

__all__ = ["decode_seq", "encode_seq"]
