"""The rows of new coordinates that spconv itself made on an NVIDIA H100, in their order.

`tests/goldens/spconv/rows` holds them; its README says how they were recorded.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
import torch

from . import apis
from .test_row_order import direct_table

FOLDER = apis.ROOT / "tests" / "goldens" / "spconv" / "rows"
RECORD = json.loads((FOLDER / "answers.json").read_text())


def layer_of(sp, name):
    conv, up, most = sp.SparseConv3d, sp.SparseConvTranspose3d, sp.SparseMaxPool3d
    native, split = sp.ConvAlgo.Native, sp.ConvAlgo.MaskSplitImplicitGemm
    return {
        "conv 3": lambda: conv(4, 4, 3, 2, 1),
        "native conv 3": lambda: conv(4, 4, 3, 2, 1, algo=native),
        "split conv 3": lambda: conv(4, 4, 3, 2, 1, algo=split),
        "conv 2": lambda: conv(4, 4, 2, 2),
        "conv 3 x 1 x 1": lambda: conv(4, 4, (3, 1, 1), (2, 1, 1)),
        "conv 5": lambda: conv(4, 4, 5, 2, 2),
        "pool 3": lambda: most(3, 2, 1),
        "pool 2": lambda: most(2, 2),
        "average pool 3": lambda: sp.SparseAvgPool3d(3, 2, 1),
        "native pool 3": lambda: most(3, 2, 1, algo=native),
        "transposed 3": lambda: up(4, 4, 3, 2, 1),
        "native transposed 3": lambda: up(4, 4, 3, 2, 1, algo=native),
    }[name]()


def digest(rows):
    return hashlib.sha256(rows.cpu().numpy().astype("<i4").tobytes()).hexdigest()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("table", [True, False])
@pytest.mark.parametrize("name", RECORD["layers"])
def test_rows_that_were_recorded(standin, device, table, name):
    """Where spconv sorts, its very rows. Elsewhere its order changes from run to run: the same
    coordinates, and always in one order of ours."""
    want = RECORD["layers"][name]
    indices = torch.from_numpy(np.load(FOLDER / "input.npz")["indices"]).int().to(device)
    features = torch.ones(len(indices), 4, device=device)
    layer = layer_of(standin, name).to(device)
    answers = []
    for training in (True, False):
        x = standin.SparseConvTensor(features, indices, RECORD["spatial_shape"], RECORD["batch_size"])
        with direct_table(table), torch.set_grad_enabled(training):
            answers.append(layer.train(training)(x).indices)
    rows = answers[0]
    assert torch.equal(rows, answers[1])
    assert len(rows) == want["rows"]
    assert digest(torch.unique(rows, dim=0)) == want["sha256"]
    assert (digest(rows) == want["sha256"]) is (want["sorted"] or not table)
