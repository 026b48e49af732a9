"""Every Python block of the README and the docs runs alone, as a reader would copy it."""

from __future__ import annotations

import ast
import multiprocessing
import os
import re
import shlex
import traceback
from pathlib import Path

import pytest

from sparse_bridge import __main__ as command_line
from sparse_bridge import settings
from sparse_bridge.adapters.enabling import inherited
from tests.patience import PATIENCE
from tests.releases import WHOLE_GRAPHS

from .pages import PAGES, ROOT, Block, blocks, name_of, programs

# Pages whose blocks compile, export or train for seconds: the first of each is quick.
LONG = ("compile.md", "export.md", "memory.md")
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = {"doctor", *command_line._LAZY}


def run_block(page: str, block: Block, folder: str, answer) -> None:
    """In a process of its own, and a namespace in which nothing is."""
    os.chdir(folder)
    space: dict[str, object] = {"__name__": "__main__"}
    try:
        # Blank lines in front, so that a traceback has the page's line numbers.
        exec(compile("\n" * (block.line - 1) + block.text, page, "exec"), space)
        answer.send(None)
    except BaseException:
        answer.send(traceback.format_exc())


@pytest.fixture(scope="module")
def fresh():
    """Processes without any framework enabled, in which torch is imported already."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        pytest.skip("this platform has no forkserver")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "numpy", __name__])
    return context


def marks_of(page: Path, number: int) -> list[pytest.MarkDecorator]:
    """Of a page's program with this number."""
    graphs, slow = page.name == "compile.md", page.name in LONG and number > 0
    return [WHOLE_GRAPHS] * graphs + [pytest.mark.slow] * slow


@pytest.mark.parametrize(
    ("page", "block"),
    [
        pytest.param(page, one, id=f"{name_of(page)}:{one.line}", marks=marks_of(page, number))
        for page in PAGES
        for number, one in enumerate(programs(page))
    ],
)
def test_a_python_block_runs_alone(page: Path, block: Block, fresh, tmp_path: Path) -> None:
    mine, theirs = fresh.Pipe()
    args = (str(page), block, str(tmp_path), theirs)
    process = fresh.Process(target=run_block, args=args)
    process.start()
    theirs.close()
    try:
        assert mine.poll(PATIENCE), "no answer in five minutes"
        failure = mine.recv()
    finally:
        process.kill()
        process.join()
    assert failure is None, failure


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_parse_and_name_their_language(page: Path) -> None:
    for block in blocks(page):
        assert block.language in ("python", "bash", "bibtex", "text"), f"{page}:{block.line}"
        if block.language == "python":
            ast.parse(block.text)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_exist(page: Path) -> None:
    for block in blocks(page):
        if block.language != "bash":
            continue
        for command in block.text.replace("&&", "\n").splitlines():
            words = shlex.split(command, comments=True)
            if words[:3] == ["python", "-m", "sparse_bridge"]:
                assert words[3] in COMMANDS, command
            elif words[:1] == ["python"] and words[1].endswith(".py"):
                exists = (ROOT / words[1]).is_file()
                assert exists or words[1] == "train.py", command


def test_ci_runs_the_readmes_test_command() -> None:
    commands = [b.text.strip() for b in blocks(ROOT / "README.md") if b.language == "bash"]
    script = (ROOT / ".ci" / "run").read_text()
    tested = [command for command in commands if "pytest" in command]
    # As the script finds it.
    first = next(line for line in README.splitlines() if "python -m pytest" in line)
    assert tested == [first]
    assert "command=$(grep -m 1 'python -m pytest' README.md)" in script.splitlines()
    assert 'eval "$command"' in script.splitlines()
    assert 'pip install ".[viz]" && python -m sparse_bridge demo' in commands


def test_settings_in_blocks_exist() -> None:
    known = {settings.PREFIX + name for name in settings.KEYWORDS} | {inherited.VARIABLE}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        # Variables of the test-suite are no settings.
        named = set(re.findall(r"SPARSE_BRIDGE_(?!TEST_)[A-Z0-9_]*[A-Z0-9]", text))
        if page.name == "environment.md":  # which says what became of the old ones
            named -= {settings.PREFIX + name for name in settings.RENAMED}
        assert named <= known, f"{name_of(page)}: {sorted(named - known)}"
