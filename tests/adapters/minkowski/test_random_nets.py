"""Random chains of layers on random clouds against the oracle: how maps and keys combine."""

from __future__ import annotations

import random

import pytest
import torch

from tests import checks

from . import reference
from .scenes import scene

REF = reference.namespace()


def kernel(rng, dimension, largest=3):
    if rng.random() < 0.6:
        return rng.choice((1, 2, 3)[:largest])
    return [rng.choice((1, 2, 3)[:largest]) for _ in range(dimension)]


def steps(rng, dimension):
    return 2 if rng.random() < 0.6 else [rng.choice((1, 2)) for _ in range(dimension)]


def step(rng, dimension, stride):
    """(class, keyword arguments) of a layer that fits this stride; or "skip", "prune"."""
    kinds = ["conv", "conv", "down", "skip", "prune"]
    even = min(stride) % 2 == 0
    kinds += ["up", "up", "grow"] if even else []
    kind = rng.choice(kinds)
    if kind in ("skip", "prune"):
        return kind, {}
    name = {"up": "MinkowskiConvolutionTranspose", "grow": "MinkowskiGenerativeConvolutionTranspose"}
    options = {"kernel_size": kernel(rng, dimension), "dimension": dimension}
    if kind == "down" and max(stride) < 8:
        options["stride"] = steps(rng, dimension)
    elif kind in ("up", "grow"):
        options["stride"] = 2
        options["kernel_size"] = 2 if kind == "grow" else options["kernel_size"]
    else:
        options["dilation"] = rng.choice((1, 1, 2))
    return name.get(kind, "MinkowskiConvolution"), options


def run(rng, ME, dimension, coords, feats, weights):
    """One chain; draws the same layers for the same generator."""
    x = ME.SparseTensor(feats, coords)
    seen, outputs = [x], []
    for number in range(7):
        kind, options = step(rng, dimension, x.tensor_stride)
        if kind == "skip":
            other = rng.choice(seen)
            x = x + other
        elif kind == "prune":
            # The mask is a function of coordinates only; it keeps about two thirds.
            site = x.C.long()
            hashed = (site * torch.arange(3, 4 + site.shape[1] * 2, 2)[: site.shape[1]]).sum(1)
            x = ME.MinkowskiPruning()(x, (hashed + number) % 3 != 0)
        else:
            layer = getattr(ME, kind)(2, 2, **options).double()
            if number not in weights:
                weights[number] = torch.randn(layer.kernel.shape, dtype=torch.float64)
            with torch.no_grad():
                layer.kernel.copy_(weights[number])
            x = layer(x)
        if len(x) > 1500:
            break
        seen.append(x)
        outputs.append(x)
    return outputs


@pytest.mark.parametrize("dimension", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(8))
def test_chain(ME, dimension, seed):
    coords, _ = scene(dimension, seed=seed)
    coords = coords[:60].contiguous()
    feats = torch.randn(len(coords), 2, dtype=torch.float64)
    weights, results = {}, []
    for space in (ME, REF):
        leaf = feats.clone().requires_grad_()
        rng = random.Random(100 * dimension + seed)
        results.append((leaf, run(rng, space, dimension, coords, leaf, weights)))
    (leaf, got), (other, want) = results
    assert len(got) == len(want) >= 1
    loss = ref_loss = 0.0
    for a, b in zip(got, want, strict=True):
        assert a.tensor_stride == b.tensor_stride
        mine = [tuple(site) for site in a.C.tolist()]
        assert set(mine) == set(b.sites) and len(mine) == len(b.sites)
        rows = torch.tensor([b.sites[site] for site in mine], dtype=torch.int64)
        checks.assert_close(a.F, b.F[rows], torch.float64)
        loss, ref_loss = loss + a.F.square().sum(), ref_loss + b.F.square().sum()
    loss.backward()
    ref_loss.backward()
    checks.assert_close(leaf.grad, other.grad, torch.float64, "gradient")
