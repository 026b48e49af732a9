"""A learned codec: the same voxels in different orders must give the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparse_bridge.errors import SettingError
from sparse_bridge.tools.checkpoints import stream
from sparse_bridge.tools.networks.codec import OccupancyCodec, canonical, child_of, occupied_children
from tests.adapters.torchsparse.conftest import DEVICES, speaking
from tests.checkpoints import arithmetic


def scan(n_points=4000, seed=0, low=0):
    """Cells int32 [N, 4] of points on walls, like those of a room: many repeat, in any order."""
    found = np.random.default_rng(seed).uniform(-1, 1, (n_points, 3))
    wall = np.arange(n_points) % 3
    found[np.arange(n_points), wall] = np.sign(found[np.arange(n_points), wall])
    cells = torch.from_numpy(np.round(40 * found)).int() + 40 + low
    return torch.nn.functional.pad(cells, (1, 0)).contiguous()


@pytest.fixture
def codec():
    """A network of small random weights, none of them 0."""
    with speaking("2.1") as ts:
        torch.manual_seed(0)
        network = OccupancyCodec(ts, 8).eval()
        for name, weight in network.named_parameters():
            if not name.startswith("fog"):
                torch.nn.init.normal_(weight, std=0.3)
        yield network


def sites(rows):
    return {tuple(row) for row in rows.tolist()}


class Recorder:
    """A coder that keeps the distributions that it is given."""

    def __init__(self):
        self.written, self.read = [], []

    def encode_int16_normalized_cdf(self, cdf, symbols):
        self.written.append(cdf)
        return arithmetic.encode_int16_normalized_cdf(cdf, symbols)

    def decode_int16_normalized_cdf(self, cdf, data):
        self.read.append(cdf)
        return arithmetic.decode_int16_normalized_cdf(cdf, data)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("low", [0, -57])
def test_every_voxel_comes_back(codec, device, low):
    """The decoder's rows stand in another order; its distributions are the encoder's to the bit."""
    voxels, coder = scan(low=low).to(device), Recorder()
    assert len(sites(voxels)) < len(voxels)
    codec.to(device)
    file = stream.encode(codec, voxels, 16.0, coder)
    step, found = stream.decode(codec, file, coder, torch.device(device), len(voxels))
    assert step == 16.0
    assert len(coder.written) == len(coder.read) > 6
    for one, other in zip(coder.written, coder.read, strict=True):
        assert torch.equal(one, other)
    assert sites(found) == sites(voxels) and len(found) == len(sites(voxels))


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_probabilities_do_not_depend_on_the_order_of_rows(codec, device):
    """Every float of them, with the cells of each level in a random order."""
    codec.to(device)
    generator = torch.Generator().manual_seed(1)
    for coords, codes in codec.levels(scan().to(device)):
        order = torch.randperm(len(coords), generator=generator).to(device)
        ones = codec.expand(coords, codes)
        others = codec.expand(coords[order].contiguous(), codes[order])
        for one, other in zip(ones, others, strict=True):
            assert torch.equal(one, other)
        halves = torch.arange(len(ones[0]), device=device) % 16
        assert torch.equal(codec.low(ones[1]), codec.low(others[1]))
        assert torch.equal(codec.high(ones[1], halves), codec.high(others[1], halves))


@pytest.mark.parametrize("device", DEVICES)
def test_the_file_does_not_depend_on_the_order_of_points(codec, device):
    codec.to(device)
    voxels = scan()
    order = torch.randperm(len(voxels), generator=torch.Generator().manual_seed(2))
    files = [
        stream.encode(codec, rows.to(device), 16.0, arithmetic)
        for rows in (voxels, voxels[order].contiguous(), torch.unique(voxels, dim=0))
    ]
    assert files[0] == files[1] == files[2]


@pytest.mark.parametrize("n_points", [1, 2, 40, 200])
def test_small_scans(codec, n_points):
    """Down to those of one level, which is written as it is."""
    voxels = scan(n_points, seed=n_points)
    file = stream.encode(codec, voxels, 4.0, arithmetic)
    assert sites(stream.decode(codec, file, arithmetic, voxels.device, n_points)[1]) == sites(voxels)


def test_levels_count_every_voxel_once(codec):
    voxels = scan()
    wanted = sites(voxels)
    with torch.no_grad():
        levels = codec.levels(voxels)
    for coords, codes in reversed(levels):
        found = {}
        for b, *site in wanted:
            bit = sum((c & 1) << axis for axis, c in enumerate(site))
            cell = (b, *(c >> 1 for c in site))
            found[cell] = found.get(cell, 0) | 1 << bit
        assert dict(zip(map(tuple, coords.tolist()), codes.tolist(), strict=True)) == found
        children, cells = occupied_children(coords, codes)
        assert sites(children) == wanted and torch.equal(canonical(children).sort().values, torch.arange(len(children)))
        assert torch.equal(coords[cells][:, 1:], children[:, 1:] >> 1)
        assert ((codes[cells] >> child_of(children)) & 1).all()
        wanted = set(found)
    assert len(levels[0][0]) < 64 <= len(levels[1][0])


def test_a_decoder_with_other_weights_stops(codec):
    voxels = scan()
    file = stream.encode(codec, voxels, 16.0, arithmetic)
    torch.nn.init.normal_(codec.pred_head_s0[0].weight, std=2.0)
    try:
        _, found = stream.decode(codec, file, arithmetic, voxels.device, len(voxels))
    except stream.CoordinateError as error:
        assert "other probabilities than were written" in str(error)
    else:
        assert sites(found) != sites(voxels) and len(found) <= len(voxels)


def test_distributions_ascend():
    """Where the network is certain, too."""
    certain = torch.eye(16)
    cdf = stream.quantised(torch.cat([certain, certain.new_full((1, 16), 1 / 16)]))
    values = cdf.int() & 0xFFFF
    values[:, -1] = 1 << 16
    assert (values.diff() > 0).all() and (values[:, 0] == 0).all()


def test_the_real_coder_reads_the_same():
    try:
        torchac = stream.torchac()
    except SettingError as error:
        pytest.skip(str(error))
    generator = torch.Generator().manual_seed(3)
    given = torch.softmax(4 * torch.randn(500, 16, generator=generator), -1)
    symbols = torch.multinomial(given, 1, generator=generator)[:, 0].to(torch.int16)
    cdf = stream.quantised(given)
    block = torchac.encode_int16_normalized_cdf(cdf, symbols)
    assert block == arithmetic.encode_int16_normalized_cdf(cdf, symbols)
    assert torch.equal(arithmetic.decode_int16_normalized_cdf(cdf, block), symbols)
