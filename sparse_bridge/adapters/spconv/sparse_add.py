"""The sum of sparse tensors over the union of their coordinates, on plain tensors."""

from __future__ import annotations

from ...core.ops.union import union_rows

__all__ = ["union_rows"]
