"""Graph convolution on relations beside PyG on generated graphs: `python -m benchmarks.relations`.

Graphs have the sizes of AIFB, MUTAG, BGS and AM (with the inverse of every edge, as R-GCN takes
them) and their laws: few relations hold most edges, few nodes most ends. Time is that of a call,
host included, after warm-up; memory is the peak above what was held before.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import sparse_bridge


class Size(NamedTuple):
    """nodes, edges (both ways), relations (both ways)."""

    nodes: int
    edges: int
    relations: int


SIZES = {
    "aifb": Size(8_285, 58_086, 90),
    "mutag": Size(23_644, 148_454, 46),
    "bgs": Size(333_845, 1_832_398, 206),
    "am": Size(1_666_764, 11_976_642, 266),
}


def graph(name: str, device: str | torch.device = "cpu", seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(edge_index int64 [2, E], edge_type int64 [E]) of a graph like `name`.

    Relations follow Zipf's law. Subjects are spread evenly, objects by a power law: a class or a
    unit is the object of many triples.
    """
    nodes, edges, relations = SIZES[name]
    generator = torch.Generator().manual_seed(seed)
    half, kinds = edges // 2, relations // 2
    share = 1.0 / torch.arange(1, kinds + 1, dtype=torch.float64)
    kind = torch.multinomial(share, half, replacement=True, generator=generator)
    subject = torch.randint(0, nodes, (half,), generator=generator)
    object_ = (torch.rand(half, generator=generator, dtype=torch.float64) ** 4 * nodes).long()
    shuffled = torch.randperm(nodes, generator=generator)
    subject, object_ = shuffled[subject], shuffled[object_]
    index = torch.stack([torch.cat([subject, object_]), torch.cat([object_, subject])])
    return index.to(device), torch.cat([kind, kind + kinds]).to(device)


class Network(torch.nn.Module):
    """Two layers of a kind, `hidden` channels between them."""

    def __init__(self, layer: type, size: Size, channels: tuple[int, int, int], **form: Any):
        super().__init__()
        first, hidden, last = channels
        self.one = layer(first, hidden, size.relations, **form)
        self.two = layer(hidden, last, size.relations, **form)

    def forward(self, x: torch.Tensor | None, *edges: torch.Tensor) -> torch.Tensor:
        return self.two(F.relu(self.one(x, *edges)), *edges)


def measured(run: Callable[[], object], device: str, rounds: int) -> tuple[float, float]:
    """(median milliseconds of a call, peak MB above what was held)."""
    timer = torch.cuda.Event if device == "cuda" else None
    for _ in range(2):
        run()
    if timer is None:
        import time

        times = []
        for _ in range(rounds):
            begin = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - begin))
        return statistics.median(times), 0.0
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(rounds):
        begin, end = timer(enable_timing=True), timer(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times), (torch.cuda.max_memory_allocated() - held) / 2**20


def _step(net: torch.nn.Module, x: torch.Tensor | None, edges: tuple[torch.Tensor, ...]) -> None:
    net.zero_grad(set_to_none=True)
    net(x, *edges).float().square().mean().backward()


def compare(name: str, channels: tuple[int, int, int], device: str, dtype: torch.dtype, rounds: int) -> list[str]:
    """Rows of the table of one graph."""
    from torch_geometric.nn import FastRGCNConv, RGCNConv

    size, edges = SIZES[name], graph(name, device)
    x = torch.randn(size.nodes, channels[0], device=device, dtype=dtype)
    rows = []
    torch.manual_seed(0)
    start = Network(RGCNConv, size, channels, num_bases=30).to(device, dtype)
    for kind, layer in (("RGCNConv", RGCNConv), ("FastRGCNConv", FastRGCNConv), ("here", RGCNConv)):
        net = Network(layer, size, channels, num_bases=30).to(device, dtype)
        net.load_state_dict(copy.deepcopy(start.state_dict()))
        cells = []

        def infer(net: torch.nn.Module = net) -> None:
            with torch.no_grad():
                net(x, *edges)

        def train(net: torch.nn.Module = net) -> None:
            _step(net, x, edges)

        for run in (infer, train):
            try:
                if kind == "here":
                    with sparse_bridge.enable("torch_geometric"):
                        took, peak = measured(run, device, rounds)
                else:
                    took, peak = measured(run, device, rounds)
                cells.append(f"{took:9.2f} ms {peak:9.0f} MB")
            except torch.cuda.OutOfMemoryError:
                cells.append("out of memory")
                torch.cuda.empty_cache()
            except RuntimeError as error:  # PyG's layers multiply no half precision
                cells.append(f"refused: {str(error)[:40]}")
        rows.append(f"{name:6} {channels} {kind:13} inference {cells[0]}  training {cells[1]}")
        del net
    return rows


def main() -> None:
    """Print a table; graphs, channels and dtype by options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("graphs", nargs="*", default=list(SIZES), help=f"of {', '.join(SIZES)}")
    parser.add_argument("--channels", type=int, nargs=3, default=(16, 16, 16))
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in args.graphs or list(SIZES):
        rows = compare(name, tuple(args.channels), device, getattr(torch, args.dtype), args.rounds)
        print("\n".join(rows), flush=True)


if __name__ == "__main__":
    main()
