"""The pools and row copies of `SpconvOps`: tv.Tensors in, results in place."""

from __future__ import annotations

import torch

from .. import functional, pairs
from ._tv_tensor import Tensor, output, to_torch


class PoolOps:
    """Streams are raw handles, and not looked at: all runs on torch's current stream."""

    @staticmethod
    def indice_maxpool(
        out_features: Tensor,
        features: Tensor,
        indice_pairs: Tensor,
        indice_pair_num: Tensor,
        num_activate_out: int,
        stream: int = 0,
    ) -> None:
        """out = max(0, window)."""
        x = to_torch(features)
        kmap = pairs.map_from_pairs(to_torch(indice_pairs), to_torch(indice_pair_num), len(x), num_activate_out)
        output(out_features).copy_(functional.max_pool(x, kmap))

    @staticmethod
    def indice_maxpool_backward(
        din: Tensor,
        features: Tensor,
        out_features: Tensor,
        out_bp: Tensor,
        indice_pairs: Tensor,
        indice_pair_num: Tensor,
        stream: int = 0,
    ) -> None:
        """Adds a window's gradient to every input that equals its result."""
        counts = to_torch(indice_pair_num).tolist()
        for (in_rows, out_rows), count in zip(to_torch(indice_pairs).transpose(0, 1), counts, strict=True):
            rows = out_rows[:count].long(), in_rows[:count].long()
            _add_gradient(out_features, features, out_bp, din, *rows)

    @staticmethod
    def maxpool_forward(out: Tensor, inp: Tensor, out_inds: Tensor, in_inds: Tensor, stream: int = 0) -> None:
        """One kernel offset: out[out_inds] = max(out[out_inds], inp[in_inds])."""
        out_rows, in_rows = to_torch(out_inds).long(), to_torch(in_inds).long()
        rows = to_torch(inp).index_select(0, in_rows)
        output(out).scatter_reduce_(0, out_rows[:, None].expand_as(rows), rows, "amax")

    @staticmethod
    def maxpool_forward_cpu(out: Tensor, inp: Tensor, out_inds: Tensor, in_inds: Tensor) -> None:
        PoolOps.maxpool_forward(out, inp, out_inds, in_inds)

    @staticmethod
    def maxpool_backward(
        out: Tensor, inp: Tensor, dout: Tensor, dinp: Tensor, out_inds: Tensor, in_inds: Tensor, stream: int = 0
    ) -> None:
        """One kernel offset: adds dout[out_inds] to dinp[in_inds] where input and output agree."""
        rows = to_torch(out_inds).long(), to_torch(in_inds).long()
        _add_gradient(out, inp, dout, dinp, *rows)

    @staticmethod
    def maxpool_backward_cpu(
        out: Tensor, inp: Tensor, dout: Tensor, dinp: Tensor, out_inds: Tensor, in_inds: Tensor
    ) -> None:
        PoolOps.maxpool_backward(out, inp, dout, dinp, out_inds, in_inds)

    @staticmethod
    def maxpool_implicit_gemm_forward(out: Tensor, inp: Tensor, inds: Tensor, stream: int = 0) -> None:
        """out = max(0, window); inds [V, M]."""
        x = to_torch(inp)
        kmap = pairs.map_from_table(to_torch(inds), len(x), out.dim(0))
        output(out).copy_(functional.max_pool(x, kmap))

    @staticmethod
    def maxpool_implicit_gemm_backward(
        out: Tensor, inp: Tensor, dout: Tensor, dinp: Tensor, inds: Tensor, stream: int = 0
    ) -> None:
        """dinp = the gradients of the windows that an input is the maximum of; inds [V, N]."""
        tensors = (to_torch(ten) for ten in (inp, out, dout, inds))
        output(dinp).copy_(functional.max_pool_backward(*tensors))

    @staticmethod
    def avgpool_implicit_gemm_forward(
        out: Tensor, inp: Tensor, inds: Tensor, count_out: Tensor, stream: int = 0
    ) -> None:
        """out = mean of the present inputs; their number into count_out, unless it is empty."""
        x, table = to_torch(inp), to_torch(inds)
        kmap = pairs.map_from_table(table, len(x), out.dim(0))
        output(out).copy_(functional.avg_pool(x, kmap))
        if not count_out.empty():
            output(count_out).copy_(pairs.counts_of(table))

    @staticmethod
    def avgpool_implicit_gemm_backward(
        dout: Tensor, dinp: Tensor, inds: Tensor, count_out: Tensor, stream: int = 0
    ) -> None:
        """dinp = 1 / count of the gradients of an input's windows; inds [V, N]."""
        tensors = (to_torch(ten) for ten in (dout, inds, count_out))
        output(dinp).copy_(functional.avg_pool_backward(*tensors))

    @staticmethod
    def maximum_value_int(data: Tensor, value: int, stream_int: int) -> None:
        """data = max(data, value)."""
        output(data).clamp_(min=value)

    @staticmethod
    def global_pool_rearrange(out_indices: Tensor, coords: Tensor, counts: Tensor, stream: int = 0) -> None:
        """Rows by batch item into out_indices int32 [B, N], their numbers into counts [B]."""
        rows, row_counts = pairs.global_pool_rearrange(to_torch(coords), counts.dim(0))
        output(out_indices).copy_(rows)
        output(counts).copy_(row_counts)

    @staticmethod
    def gather_cpu(out: Tensor, inp: Tensor, inds: Tensor) -> None:
        """out[i] = inp[inds[i]], for as many rows as there are indices."""
        rows = to_torch(inds).long()
        output(out)[: len(rows)] = to_torch(inp).index_select(0, rows)

    @staticmethod
    def scatter_add_cpu(out: Tensor, inp: Tensor, inds: Tensor) -> None:
        """out[inds[i]] += inp[i], for as many rows as there are indices."""
        rows = to_torch(inds).long()
        output(out).index_add_(0, rows, to_torch(inp)[: len(rows)])


def _add_gradient(
    out: Tensor, inp: Tensor, dout: Tensor, dinp: Tensor, out_rows: torch.Tensor, in_rows: torch.Tensor
) -> None:
    """Rows of inputs and of outputs that meet at a kernel offset."""
    equal = to_torch(inp).index_select(0, in_rows) == to_torch(out).index_select(0, out_rows)
    gradient = to_torch(dout).index_select(0, out_rows)
    output(dinp).index_add_(0, in_rows, torch.where(equal, gradient, 0))
