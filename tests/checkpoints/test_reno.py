"""`verify reno`, on made-up weights and scans, and on a made-up tree with its program's scripts."""

from __future__ import annotations

import json
import sys
import textwrap

import numpy as np
import pytest
import torch

from sparse_bridge import __main__ as command_line
from sparse_bridge.tools.checkpoints import reno, stream
from sparse_bridge.tools.networks.codec import OccupancyCodec
from tests.adapters.torchsparse.conftest import DEVICES, speaking

from . import arithmetic, made_up

# What each made-up script does: finds its arguments, counts occupancy with a sparse layer, and
# passes the points on as they are.
COMPRESS = """
    import os, sys
    import numpy as np, torch, torchsparse
    import torchsparse.nn as spnn

    def after(option):
        return sys.argv[sys.argv.index(option) + 1]

    assert os.path.isfile("network.py") and torch.load(after("--ckpt"), weights_only=True)
    text = open(after("--input_glob")).read().partition("end_header\\n")[2]
    step = int(after("--posQ"))
    points = np.array(text.split(), float).reshape(-1, 3)
    cells = np.round((points / 0.001 + 131072) / step).astype(np.int32)
    coords = torch.nn.functional.pad(torch.from_numpy(cells), (1, 0))
    layer = spnn.Conv3d(1, 1, 2, stride=2)
    layer(torchsparse.SparseTensor(torch.ones(len(coords), 1), coords))
    os.makedirs(after("--output_folder"))
    np.save(open(after("--output_folder") + "scan.ply.bin", "wb"), cells[LOST:] * step)
"""
DECOMPRESS = """
    import os, sys
    import numpy as np

    def after(option):
        return sys.argv[sys.argv.index(option) + 1]

    points = (np.load(after("--input_glob").replace("*.bin", "scan.ply.bin")) - 131072) * 0.001
    os.makedirs(after("--output_folder"))
    with open(after("--output_folder") + "scan.ply.bin.ply", "w") as file:
        file.write(f"ply\\nformat ascii 1.0\\nelement vertex {len(points)}\\nend_header\\n")
        np.savetxt(file, points, "%.9g")
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Arguments of the command: small random weights, and a scan of which points repeat."""
    monkeypatch.setattr(stream, "torchac", lambda: arithmetic)
    monkeypatch.setenv("COLUMNS", "80")  # a narrow terminal
    torch.manual_seed(0)
    with speaking("2.1") as ts:
        network = OccupancyCodec(ts)
    torch.save(network.state_dict(), tmp_path / "ckpt.pt")
    points = np.random.default_rng(0).uniform(-4, 4, (700, 4)).astype("<f4")
    points[:, 2] = 0.5
    np.concatenate([points, points[:90]]).tofile(tmp_path / "scan.bin")
    return ["verify", "reno", "--checkpoint", str(tmp_path / "ckpt.pt"), "--data", str(tmp_path / "scan.bin")]


@pytest.fixture
def program(place, tmp_path):
    """The same with a source tree, whose program loses so many points."""

    def make(lost=0):
        folder = tmp_path / "RENO"
        made_up.write(folder / "network.py")
        script = textwrap.dedent(COMPRESS).replace("LOST", str(lost))
        made_up.write(folder / "compress.py", script)
        made_up.write(folder / "decompress.py", textwrap.dedent(DECOMPRESS))
        return [*place, "--project", str(folder), "--bits", "14"]

    return make


def refused(arguments, capsys):
    assert command_line.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err.strip().splitlines()[-1]


@pytest.mark.parametrize("device", DEVICES)
def test_every_voxel_comes_back(place, capsys, device):
    place += ["--device", device]
    assert command_line.main([*place, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["weights"] == {"keys": 22, "others": 0} and facts["device"] == device
    assert [one["bits"] for one in facts["results"]] == [12, 14]
    for one in facts["results"]:
        assert one["points"] == 790 and one["came_back"] == one["voxels"] <= 700
        assert one["whole"] and one["extra"] == 0
        assert one["bits_per_point"] == 8 * one["size"] / 790
    assert command_line.main([*place, "--bits", "9"]) == 0
    shown = capsys.readouterr()
    assert "9 bits" in shown.out and "every voxel" in shown.out and "14 bits" not in shown.out
    assert "22 keys as published" in shown.err


def test_sizes_may_be_expected(place, capsys):
    assert command_line.main([*place, "--json"]) == 0
    size = json.loads(capsys.readouterr().out)["results"][0]["size"]
    assert command_line.main([*place, "--expect", f"12={size}"]) == 0
    other = round(1.02 * size)
    assert command_line.main([*place, "--expect", f"12={other}"]) == 1
    assert "every voxel, another size" in capsys.readouterr().out
    assert command_line.main([*place, "--expect", f"12={other}", "--tolerance", "3"]) == 0
    capsys.readouterr()
    for wrong in ("12", "13=100", "12=0", "12=x", "mIoU=3"):
        assert "expected BITS=BYTES with one of 12, 14" in refused([*place, "--expect", wrong], capsys)


def test_a_decoder_that_loses_its_way(place, capsys, monkeypatch):
    """Its network is another one than the encoder's, as one that depends on the order of rows."""
    own = stream.decode

    def disturbed(network, *given):
        with torch.no_grad():
            network.pred_head_s0[2].bias.copy_(4 * torch.randn(16))
        return own(network, *given)

    monkeypatch.setattr(stream, "decode", disturbed)
    assert command_line.main([*place, "--json"]) == 1
    for one in json.loads(capsys.readouterr().out)["results"]:
        assert not one["whole"] and one["came_back"] < one["voxels"]
    assert command_line.main(place) == 1
    assert "not every voxel" in capsys.readouterr().out


def test_check_needs_no_coder(place, capsys, monkeypatch):
    monkeypatch.setattr(stream, "torchac", None)
    assert command_line.main([*place, "--check"]) == 0
    assert "Nothing was written" in capsys.readouterr().out
    assert command_line.main([*place, "--check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"] is None


def test_a_missing_coder(place, capsys, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "torchac", None)
    line = refused(place, capsys)
    assert "torchac" in line and "pip install 'sparse-bridge[codec]'" in line


def test_a_coder_that_cannot_be_built(place, capsys, monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "torchac", raising=False)
    made_up.write(tmp_path / "site" / "torchac.py", "print('building')\nraise RuntimeError('no ninja')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert "torchac is installed, but cannot compile itself (no ninja)" in refused(place, capsys)


def test_wrong_files_and_options(place, capsys, tmp_path):
    held = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    torch.save({**held, "pred_head_s0.0.weight": torch.zeros(3)}, tmp_path / "other.pt")
    line = refused([*place, "--checkpoint", str(tmp_path / "other.pt")], capsys)
    assert "1 have another shape (pred_head_s0.0.weight [3] for [32, 32])" in line
    assert "is a folder" in refused([*place, "--data", str(tmp_path)], capsys)
    for bits in ("2", "19"):
        assert "expected 3 to 18 bits" in refused([*place, "--bits", bits], capsys)
    assert "0 or more" in refused([*place, "--tolerance", "-1"], capsys)
    assert "lacks compress.py" in refused([*place, "--project", str(tmp_path)], capsys)
    if not torch.cuda.is_available():
        assert "torch sees no GPU" in refused([*place, "--device", "cuda"], capsys)
    other = ["verify", "openpcdet", *place[2:], "--device", "cpu"]
    assert "--device is for reno" in refused(other, capsys)


@pytest.mark.slow
def test_its_own_program(program, capsys):
    assert command_line.main([*program(), "--json"]) == 0
    shown = capsys.readouterr()
    (one,) = json.loads(shown.out)["results"]
    assert one["whole"] and one["voxels"] > 600 and one["size"] > 12 * 790
    assert "torchsparse" in shown.err and "Conv3d" in shown.err, "the report of what was bridged"
    assert "--device is for the network here" in refused([*program(), "--device", "cpu"], capsys)


@pytest.mark.slow
def test_its_own_program_loses_points(program, capsys):
    assert command_line.main([*program(lost=500), "--json"]) == 1
    (one,) = json.loads(capsys.readouterr().out)["results"]
    assert not one["whole"] and 0 < one["came_back"] < one["voxels"]


@pytest.mark.slow
def test_its_own_program_fails(program, capsys, tmp_path):
    arguments = program()
    made_up.write(tmp_path / "RENO" / "decompress.py", "raise SystemExit('no GPU today')\n")
    assert command_line.main(arguments) == 1
    shown = capsys.readouterr()
    assert "no GPU today" in shown.err and shown.out == ""


def test_the_names_of_the_parameters():
    """As in the published files."""
    with speaking("2.1") as ts:
        shapes = {key: list(value.shape) for key, value in OccupancyCodec(ts).state_dict().items()}
    conv = [27, 32, 32]
    trunk = ["0", "2.conv0", "2.conv1", "3.conv0", "3.conv1"]
    want = {f"{side}_resnet.{name}.kernel": conv for side in ("prior", "target") for name in trunk}
    want |= {"prior_embedding.weight": [256, 32], "fog.conv.kernel": [8, 1, 1]}
    want |= {"target_embedding.target_res_embedding.weight": [8, 32]}
    want["pred_head_s1_emb.weight"] = [16, 32]
    for head in ("pred_head_s0", "pred_head_s1"):
        want |= {f"{head}.0.weight": [32, 32], f"{head}.0.bias": [32]}
        want |= {f"{head}.2.weight": [16, 32], f"{head}.2.bias": [16]}
    assert shapes == want and len(want) == 22
    assert reno.PRECISIONS == (12, 14)
