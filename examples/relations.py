"""Node classification in a knowledge graph: two layers of graph convolution on relations.

    python examples/relations.py

Persons work at institutes and cite each other; who works where is known for a few of them. With
PyG installed the layers are `torch_geometric.nn.RGCNConv`, which `sparse_bridge.enable` serves;
without it `RelationalConv`, the same layer.
"""

from __future__ import annotations

import argparse
import importlib.util

import torch
import torch.nn.functional as F

import sparse_bridge

if importlib.util.find_spec("torch_geometric"):
    sparse_bridge.enable("torch_geometric")
    from torch_geometric.nn import RGCNConv as Layer
else:
    from sparse_bridge.core.functional import RelationalConv as Layer

INSTITUTES, TOPICS = 4, 40
CITES, CITED, WRITES_ON, READ_BY = range(4)


def knowledge(persons: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(edges [2, E], relations [E], institute of every person): colleagues cite each other and
    write on their institute's topics three times out of four. Nodes: persons, then topics."""
    institute = torch.randint(0, INSTITUTES, (persons,))
    by_institute = institute.argsort()
    cite = torch.randint(0, persons, (2, 6 * persons))
    near = torch.rand(cite.shape[1]) < 0.75
    place = torch.searchsorted(institute[by_institute], institute[cite[0]])
    size = institute.bincount(minlength=INSTITUTES)[institute[cite[0]]]
    cite[1] = torch.where(near, by_institute[place + (torch.rand(len(place)) * size).long()], cite[1])
    author = torch.arange(persons).repeat(3)
    own = institute[author] * (TOPICS // INSTITUTES) + torch.randint(0, 10, author.shape)
    topic = torch.where(torch.rand(author.shape) < 0.75, own, torch.randint(0, TOPICS, own.shape))
    write = torch.stack([author, persons + topic])
    edges = torch.cat([cite, cite.flip(0), write, write.flip(0)], 1)
    counts = torch.tensor([cite.shape[1]] * 2 + [write.shape[1]] * 2)
    return edges, torch.arange(4).repeat_interleave(counts), institute


class Network(torch.nn.Module):
    """Numbers of nodes -> logits of the institutes."""

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self.one = Layer(nodes, 16, num_relations=4, num_bases=4)
        self.two = Layer(16, INSTITUTES, num_relations=4)

    def forward(self, edges: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        return self.two(F.relu(self.one(None, edges, kinds)), edges, kinds)


def main() -> None:
    """Train on a tenth of the persons; print how many of the others are right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--persons", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    edges, kinds, institute = (t.to(args.device) for t in knowledge(args.persons))
    known = torch.arange(args.persons, device=args.device) % 10 == 0
    net = Network(args.persons + TOPICS).to(args.device)
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    for step in range(args.steps + 1):
        logits = net(edges, kinds)[: args.persons]
        if step % 20 == 0 or step == args.steps:
            right = (logits.argmax(1) == institute)[~known].float().mean()
            print(f"step {step:3}: {100 * right:.1f} % of the others are right")
        loss = F.cross_entropy(logits[known], institute[known])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
