"""Command lines that do not fit: one line that says what was meant, before torch is imported."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from sparse_bridge import __main__ as command_line
from sparse_bridge import _version
from tests.patience import PATIENCE

ROOT = pathlib.Path(command_line.__file__).parents[1]
# Words, and what the one line says.
REFUSED = [
    ("doctr", "Did you mean: 'doctor'? See `python -m sparse_bridge --help`."),
    ("demo --pionts ok.bin", "unrecognized arguments: --pionts ok.bin. Did you mean: '--points'? See"),
    ("demo --nonsense", "unrecognized arguments: --nonsense; see `python -m sparse_bridge demo --help`."),
    ("demo --seed 99999999999999999999999", "--seed: got 99999999999999999999999; expected 0 to 18446744073709551615"),
    ("demo --seed -1", "--seed: got -1; expected 0 to"),
    ("demo --train -1", "--train: got -1; expected 0 or more"),
    ("demo --segment -1", "--segment: got -1; expected 0 or more"),
    ("demo --repeats 0", "--repeats: got 0; expected 1 or more"),
    ("demo --repeats many", "invalid int value: 'many'"),
    ("demo --voxel-size 1e12", "--voxel-size: got 1e12; expected a number above 0, at most 100"),
    ("demo --voxel-size nan", "--voxel-size: got nan"),
    ("demo --voxel-size -1e-3", "--voxel-size: got -1e-3"),
    ("demo --points-columns 2", "--points-columns: got 2; expected 3 or more"),
    ("demo --no-picture --points absent.bin", "absent.bin: no such file"),
    ("demo --no-picture --points scan.foo", "suffix '.foo' is not known"),
    ("demo --no-picture --points scan.npy --points-columns 4", "--points-columns 4, which only a .bin"),
    ("demo --no-picture --range 0 0 0 1 -1e1 1", "range is [0.0, 0.0, 0.0, 1.0, -10.0, 1.0]"),
    ("warm --rows 0", "--rows: got 0; expected 1 or more"),
    ("warm --budget 0", "--budget: got 0; expected a number above 0"),
    ("warm --channels 16 -1", "--channels: got -1"),
    ("warm --jobs 0", "--jobs: got 0"),
    ("warm --dtypes fp61", "Did you mean: 'fp16'?"),
    ("warm --again", "--again is about --tune"),
    ("warm --models", "nothing to run"),
    ("package secnd --out x", "or module:function. Did you mean: 'second'?"),
    ("package second --rows 1 --out x", "--rows: got 1; expected 2 or more"),
    ("prove --only speeed", "Did you mean: 'speed'?"),
    ("prove --device foo", "--device foo: expected cpu, cuda or cuda:1."),
    ("prove --minutes 0", "--minutes: got 0; expected a number above 0"),
    ("cache shwo", "Did you mean: 'show'? See `python -m sparse_bridge cache --help`."),
    ("cache show --bukets", "Did you mean: '--buckets'? See `python -m sparse_bridge cache show --help`."),
    ("doctor --targets sm_999", "architecture 'sm_999' is that of no GPU; expected one like gfx90a"),
    ("doctor --targets gfx94", "Did you mean: 'gfx942'?"),
    ("doctor --targets --workers 0", "--workers: got 0; expected 1 or more"),
    ("run --mode patsh train.py", "Did you mean: 'patch'?"),
    ("run --framework spcnv train.py", "Did you mean: 'spconv'?"),
    ("-v run train.py", "unrecognized arguments before the command: -v; see `python -m sparse_bridge --help`."),
    ("--optimize fuse run train.py", "unrecognized arguments before the command: --optimize; see"),
    ("--verison", "unrecognized arguments before the command: --verison. Did you mean: '--version'? See"),
    ("run :car:", "can't find ':car:'"),
    ("prove --device cuda:car:x", "--device cuda:car:x: expected"),
    ("surface spcnv", "Did you mean: 'spconv'?"),
    ("run --memory-limit -1GiB train.py", "'-1GiB'; expected a size such as"),
    ("run --profile-calls 5 train.py", "--profile-calls without --profile, which it needs; add it."),
    ("run --profile --profile-calls 0 train.py", "--profile-calls: got 0; expected 1 or more"),
    ("verify openpcd", "Did you mean: 'openpcdet'?"),
]
PROGRAM = """
import contextlib, io, json, sys
from sparse_bridge.__main__ import main
answers = []
for words in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(words.split())
        except SystemExit as ended:
            status = ended.code
    answers.append([status, out.getvalue(), err.getvalue(), "torch" in sys.modules])
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Exit status, output, errors, and whether torch was imported, by command line; of one process."""
    folder = tmp_path_factory.mktemp("wrong")
    for name in ("train.py", "scan.foo", "scan.npy"):
        (folder / name).write_text("1\n")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps([words for words, _ in REFUSED]),
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=PATIENCE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"},
    )
    assert done.returncode == 0, done.stderr
    return dict(zip([words for words, _ in REFUSED], json.loads(done.stdout), strict=True))


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_what_does_not_fit_is_refused_in_one_line_without_torch(words, said, answers):
    status, out, err, torch_imported = answers[words]
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("sparse_bridge: ") and said in err
    assert not torch_imported


def test_the_version_of_a_checkout_names_its_commit(tmp_path, capsys):
    def git(*words):
        identity = ["-c", "user.name=me", "-c", "user.email=me@example.com"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

    try:
        git("init")
    except FileNotFoundError:
        pytest.skip("there is no git here")
    assert _version.commit(tmp_path) == ("", False), "no checkout of this package"
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "sparse-bridge"\n')
    git("add", ".")
    git("commit", "-m", "first")
    name, changed = _version.commit(tmp_path)
    assert re.fullmatch("[0-9a-f]{7,}", name) and not changed
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "sparse-bridge" # mine\n')
    assert _version.commit(tmp_path) == (name, True)
    inner = tmp_path / "site-packages"  # an installed package in somebody's repository
    inner.mkdir()
    (inner / "pyproject.toml").write_text('[project]\nname = "sparse-bridge"\n')
    assert _version.commit(inner) == ("", False)


def test_version_and_doctor_say_the_same(monkeypatch, capsys):
    monkeypatch.setattr(_version, "commit", lambda: ("1a2b3c4", True))
    assert _version.described() == f"{_version.__version__}+g1a2b3c4.dirty"
    with pytest.raises(SystemExit) as ended:
        command_line.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"sparse_bridge {_version.__version__}+g1a2b3c4.dirty\n"
    from sparse_bridge.tools import doctor

    assert doctor.collect(self_check=False)["sparse_bridge"] == _version.described()
    monkeypatch.setattr(_version, "commit", lambda: ("", False))
    assert _version.described() == _version.__version__
