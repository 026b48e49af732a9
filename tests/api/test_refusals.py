"""What a stranger gives the commands by mistake: one line, exit status 2, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from sparse_bridge import __main__ as command_line
from sparse_bridge.tools.harness import results
from tests.patience import PATIENCE

ROOT = os.path.dirname(os.path.dirname(command_line.__file__))
NAN = np.full((4, 4), np.nan, np.float32).tobytes()
ROWS = np.random.default_rng(0).normal(0, 1e6, (50, 4)).astype(np.float32).tobytes()
NO_NUMBERS = np.lib.format.magic(1, 0) + b"\x20\x00{'descr': '|O',\n 'shape': (1,), }  \n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder of the commands."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys, *words):
    """The line that the command says; fails unless that is all and the status is 2."""
    before = sorted(os.listdir())
    try:
        status = command_line.main(list(words))
    except SystemExit as ended:  # refused as the words are read
        status = ended.code
    assert status == 2
    said = capsys.readouterr()
    assert said.out.strip() == "" and said.err.startswith("sparse_bridge: "), said
    assert said.err.count("\n") == 1 and "Traceback" not in said.err
    assert sorted(os.listdir()) == before
    return said.err


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.bin", b"", "0 bytes"),
        ("nan.bin", NAN, "NaN, infinite"),
        ("cut.bin", ROWS[:-3], "truncated"),
        ("wide.bin", ROWS, "larger --voxel-size"),
        ("objects.npy", NO_NUMBERS, "not a readable"),
        ("cut.npz", b"PK\x03\x04", "not a readable"),
        ("text.pcd", b"hello", "no .pcd header"),
        ("photo.jpg", b"\xff\xd8", "is not known"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_scans_that_are_none(folder, capsys, name, content, words):
    (folder / name).write_bytes(content)
    assert words in refused(capsys, "demo", "--points", name, "--no-picture")


def test_scans_that_are_not_there(folder, capsys):
    assert "no such file" in refused(capsys, "demo", "--points", "absent.ply", "--no-picture")
    (folder / "a.npy").mkdir()
    assert "is a folder" in refused(capsys, "demo", "--points", "a.npy", "--no-picture")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["demo", "warm", "prove", "bench", "compat"])
def test_a_gpu_that_is_not_there(folder, capsys, command):
    assert "torch finds no" in refused(capsys, command, "--device", "cuda")


@pytest.mark.parametrize(
    "words",
    [
        ("demo", "--seed", "-1", "--no-picture"),
        ("demo", "--voxel-size", "nan", "--no-picture"),
        ("demo", "--voxel-size", "inf", "--no-picture"),
        ("demo", "--voxel-size", "1e308", "--no-picture"),
        ("demo", "--range", "nan", "0", "0", "1", "1", "1", "--no-picture"),
        ("demo", "--range", "0", "0", "0", "inf", "1", "1", "--no-picture"),
        ("demo", "--range", "-1", "0", "0", "1e308", "1", "1", "--no-picture"),
        ("warm", "--channels", "0"),
        ("doctor", "--targets", "toaster"),
        ("doctor", "--kernel", "gather_gemm"),
        ("doctor", "--write", "targets.md"),
        ("doctor", "--full", "--workers", "2"),
        ("doctor", "--workers", "0"),
        ("doctor", "--workers", "0", "--targets", "sm_90"),
        ("doctor", "--workers", "-3", "--targets", "sm_90"),
        ("prove", "--only", "maps", "--skip", "maps"),
        ("prove", "--minutes", "nan", "--only", "maps"),
        ("prove", "--device", "toaster"),
        ("prove", "--device", "meta"),
        ("run", "--profile-calls", "0", "train.py"),
        ("run", "--framework", "toaster", "train.py"),
    ],
)
def test_numbers_and_names_out_of_range(folder, capsys, words):
    refused(capsys, *words)


def test_a_framework_that_is_unknown_is_named_before_a_file_that_is_absent(folder, capsys):
    assert "'toaster' is unknown" in refused(capsys, "run", "--framework", "toaster", "absent.py")


@pytest.mark.parametrize(
    ("scale", "size", "words"),
    [
        (9, "1e-9", "more than 1e9 GiB"),
        (1e30, "0.1", "more than 1e9 GiB"),
        (3e37, "1e-9", "more than 1e9 GiB"),
        (9, "1e-12", "1e-09 or more"),
        (9, "5e-324", "1e-09 or more"),
    ],
)
def test_a_grid_beyond_all_measure_is_refused_in_few_digits(folder, capsys, scale, size, words):
    np.save("a.npy", np.random.default_rng(0).normal(0, scale, (50, 4)).astype(np.float32))
    line = refused(capsys, "demo", "--points", "a.npy", "--voxel-size", size, "--no-picture")
    assert words in line and len(line) < 250


@pytest.mark.parametrize("file", ["checkpoint", "data"])
@pytest.mark.parametrize("project", ["openpcdet", "reno"])
def test_files_of_verify_are_looked_at_before_torch_is_imported(folder, project, file):
    (folder / "there.pth").write_bytes(b"x")
    paths = {"checkpoint": "there.pth", "data": "there.pth", file: "absent.pth"}
    options = [word for name, path in paths.items() for word in (f"--{name}", path)]
    code = (
        "import sys\nfrom sparse_bridge.__main__ import main\n"
        f"status = main(['verify', {project!r}, *{options!r}])\n"
        "assert status == 2 and 'torch' not in sys.modules, status"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "PYTHONPATH": ROOT},
    )
    assert done.returncode == 0 and "absent.pth" in done.stderr, done.stderr


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="Linux has a folder that takes no files")
def test_a_place_that_takes_no_files_whatever_its_rights_say(folder, capsys):
    words = ("demo", "--no-picture", "--segment", "0", "--json", "/proc/self/out.json")
    assert "cannot be written" in refused(capsys, *words)


@pytest.mark.parametrize(
    "words",
    [
        ("prove", "--only", "pools", "--json"),
        ("warm", "--channels", "16", "--tune", "--export"),
        ("doctor", "--targets", "sm_90", "--write"),
        ("compat", "--model", "1", "--device", "cpu", "--json"),
    ],
)
def test_files_that_cannot_be_written_are_found_out_first(folder, capsys, words):
    (folder / "taken").mkdir()
    assert f"{words[-1]} taken: got a folder" in refused(capsys, *words, "taken")
    (folder / "file").write_text("")
    line = refused(capsys, *words, os.path.join("file", "out.json"))
    assert "cannot be written" in line


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has a device that is full")
def test_a_full_disk_leaves_nothing_half_written(folder, capsys, monkeypatch):
    """A device is written to, not replaced; and the part of a file goes when there is no space."""
    with pytest.raises(OSError, match="No space left"):
        results.save(folder.__class__("/dev/full"), 1, {"a": 1})
    assert not os.path.isfile("/dev/full")
    (folder / "whole.json.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        results.save(folder / "whole.json", 1, {"a": 1})
    assert os.listdir() == []


@pytest.mark.slow
def test_layers_run_where_torch_has_no_triton(folder):
    """On a CPU nothing is said; `doctor` names it."""
    (folder / "sitecustomize.py").write_text("import sys; sys.modules['triton'] = None")
    (folder / "train.py").write_text(
        "import torch, spconv.pytorch as spconv\n"
        "i = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 2]], dtype=torch.int32)\n"
        "x = spconv.SparseConvTensor(torch.randn(2, 4), i, [8, 8, 8], 1)\n"
        "spconv.SubMConv3d(4, 8, 3)(x).features.sum().backward()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), ROOT])}
    for status, words in (
        (0, ["run", "--mode", "standin", "train.py"]),
        (2, ["doctor", "--targets", "sm_90"]),
        (0, ["cache", "show"]),
        (0, ["doctor"]),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "sparse_bridge", *words],
            capture_output=True,
            text=True,
            env={**environment, "COLUMNS": "250"},
            timeout=PATIENCE,
        )
        assert done.returncode == status, done.stderr
        if status:
            assert done.stderr.count("\n") == 1 and "needs Triton 3.5" in done.stderr
    assert "plain torch" in done.stdout and "reinstall" not in done.stdout
    if not torch.cuda.is_available():
        assert "only layers on a GPU need it" in done.stdout


@pytest.mark.slow
def test_two_processes_at_once_share_a_cache(folder):
    """Both list, clear and create the same folder; neither fails over the other."""
    environment = {**os.environ, "PYTHONPATH": ROOT, "SPARSE_BRIDGE_CACHE_DIR": str(folder / "c")}
    pair = [
        subprocess.Popen(
            [sys.executable, "-m", "sparse_bridge", "cache", *words],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        for words in (["clear"], ["show"])
    ]
    for process in pair:
        _, said = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, said
