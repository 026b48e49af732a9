"""Which dataflow serves a map where nobody forces one: by rows, offsets and channels."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from sparse_bridge import settings
from sparse_bridge.core.conv import kernel_products, registry
from sparse_bridge.core.conv.choice import flow_of
from sparse_bridge.core.conv.dataflow import Case, LayerProduct
from sparse_bridge.core.geometry.weights import layout_of
from sparse_bridge.core.maps.rows import Rows
from sparse_bridge.core.maps.rulebook import Rulebook
from sparse_bridge.kernels.runtime import target as targets

CPU = torch.device("cpu")


def chosen(arch="sm_90", n_rows=20_000, n_offsets=8, c_in=32, c_out=32, **options):
    target = dataclasses.replace(targets.described(arch), compute_units=132)
    dtype, symmetric = options.get("dtype", torch.float16), options.get("symmetric", False)
    weight = torch.empty(n_offsets, c_in // options.get("groups", 1), c_out, device="meta")
    w = layout_of(weight, "vio", options.get("groups", 1))
    count = torch.zeros(1, dtype=torch.int32) if options.get("padded") else None
    rows = Rows(n_rows if count is None else None, count, n_rows)
    side = options.get("tiled")
    views = [SimpleNamespace(tiled=True) if side == one else None for one in range(2)]
    book = Rulebook(rows, rows, n_offsets, CPU, symmetric=symmetric, views=views)
    book.trained = options.get("trained", False)
    product = LayerProduct(target, CPU, dtype, options.get("precision", "ieee"), w)
    return flow_of(book, 0, product)


@pytest.mark.parametrize(
    "options, flow",
    [
        ({}, "unmasked"),
        ({"padded": True}, "unmasked"),
        ({"c_in": 64, "c_out": 64}, "unmasked"),
        ({"tiled": 0}, "masked"),  # no table has to be made of its tiles
        ({"tiled": 1}, "unmasked"),
        ({"c_in": 256, "c_out": 256, "n_rows": 60_000}, "masked"),
        ({"c_in": 256, "c_out": 256, "n_rows": 500}, "unmasked"),
        ({"trained": True}, "masked"),
        ({"n_offsets": 27}, "unmasked"),
        ({"n_offsets": 27, "n_rows": 55_000}, "unmasked"),
        ({"n_offsets": 27, "n_rows": 55_000, "c_in": 64, "c_out": 64}, "masked"),
        ({"n_offsets": 27, "c_in": 160, "c_out": 160}, "masked"),
        ({"n_offsets": 27, "trained": True}, "masked"),
        ({"n_offsets": 27, "symmetric": True}, "masked"),
        ({"n_offsets": 64}, "masked"),
        ({"n_offsets": 3, "symmetric": True}, "masked"),
        ({"n_offsets": 125, "symmetric": True, "c_in": 4, "n_rows": 90_000}, "unmasked"),
        ({"n_offsets": 125, "symmetric": True, "c_in": 4, "tiled": 0}, "unmasked"),  # as built alone
        ({"n_offsets": 125, "symmetric": True, "c_in": 4, "trained": True}, "masked"),
        ({"n_offsets": 125, "symmetric": True, "c_in": 4, "precision": "half"}, "masked"),
        ({"n_offsets": 125, "symmetric": True, "c_in": 4, "n_rows": 4_000_000}, "masked"),
        ({"n_offsets": 125, "symmetric": True, "c_in": 16}, "masked"),
        ({"n_offsets": 27, "symmetric": True, "c_in": 4}, "masked"),  # others order it
        ({"c_in": 64, "c_out": 64, "n_rows": 60_000, "dtype": torch.float32}, "masked"),
        ({"c_in": 64, "c_out": 64, "n_rows": 60_000, "dtype": torch.float32, "precision": "tf32"}, "unmasked"),
    ],
    ids=str,
)
def test_tables_in_the_order_of_rows(options, flow):
    assert chosen(**options) == flow


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("n_rows", [1, 848, 5000])
def test_few_rows_under_a_large_weight(n_rows, trained):
    """Lists of pairs would be faster, but add up in another order."""
    given = {"n_offsets": 27, "c_in": 1024, "c_out": 1024, "symmetric": True}
    assert chosen(n_rows=n_rows, trained=trained, **given) == "masked"


def test_a_forced_dataflow_follows_no_rule(monkeypatch):
    case = Case(torch.device("cuda"), torch.float16)
    monkeypatch.setattr(kernel_products, "kernel_target", lambda _: targets.described("sm_90"))
    with settings.override(dataflow="auto", self_check=False):
        ruled = registry.choose(case)
        forced = [registry.choose(case, "masked")]
    with settings.override(dataflow="masked", self_check=False):
        forced.append(registry.choose(case))
    assert ruled is registry.entry("masked").by_rule() and ruled not in forced
    assert forced == [registry.entry("masked")] * 2
    assert forced[0].serves(None, 0, None) == "masked"
