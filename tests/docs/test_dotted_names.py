"""Every `sparse_bridge.something` that a page or an example writes is there after `import sparse_bridge` alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests.patience import PATIENCE

from .pages import PAGES, ROOT

TEXTS = [*PAGES, *sorted((ROOT / "examples").glob("*.py")), *sorted((ROOT / "examples").glob("*.ipynb"))]
# Neither of another package (`torch.ops.sparse_bridge...`) nor of a path (`.../sparse_bridge.json`).
NAME = re.compile(r"(?<![\w./-])sparse_bridge(?:\.[A-Za-z_]\w*)+")
IMPORT = re.compile(r"^\s*\W*(?:from (sparse_bridge[\w.]*) import ([\w, ]+)|import (sparse_bridge[\w.]*))", re.M)
OTHERS = {"sparse_bridge.rulebooks": "a key in the metadata of ONNX files"}

# A process for each: what one name imports would answer for the next.
EVALUATE = """
import json, os, sys
import numpy, torch, torch._dynamo, torch.export  # so that each child need not
missing = []
for text in json.load(sys.stdin):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        answer = b""
        try:
            exec(text, {})
        except BaseException as error:
            answer = f"{text}: {type(error).__name__}: {error}".encode()
        os.write(write, answer)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answered:
        missing += filter(None, [answered.read()])
    os.waitpid(child, 0)
print(json.dumps(missing))
"""


def names_in(text: str) -> set[str]:
    """The dotted names that a reader of the text may type."""
    return set(NAME.findall(IMPORT.sub("", text))) - set(OTHERS)


def imports_in(text: str) -> set[str]:
    """Its import statements."""
    found = IMPORT.findall(text)
    return {f"from {module} import {names}" if module else f"import {alone}" for module, names, alone in found}


def missing(statements: set[str]) -> list[str]:
    """What fails in a process that has imported torch and nothing of this package."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", EVALUATE],
        input=json.dumps(sorted(statements)),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=environment,
        check=True,
    )
    return json.loads(done.stdout)


def test_names_of_a_text():
    text = "`sparse_bridge.export.x(a)`, torch.ops.sparse_bridge.conv, see a/sparse_bridge.json\n"
    text += "    from sparse_bridge.core import functional as f\nimport sparse_bridge.compile  # and more\n"
    assert names_in(text) == {"sparse_bridge.export.x"}
    assert imports_in(text) == {"from sparse_bridge.core import functional as f", "import sparse_bridge.compile"}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_names_in_pages_and_examples_exist():
    texts = [path.read_text(encoding="utf-8") for path in TEXTS]
    names = set().union(*map(names_in, texts))
    imports = set().union(*map(imports_in, texts))
    assert len(names) > 30 and "sparse_bridge.compile.fuse" in names and len(imports) > 15
    # A name's beginning is evaluated with it. Imports need no process each: what one brings, the next finds anyway.
    longest = {name for name in names if not any(other.startswith(name + ".") for other in names)}
    false = "import sparse_bridge; sparse_bridge.export.nonesuch"
    programs = {f"import sparse_bridge; {name}" for name in longest} | {"\n".join(sorted(imports)), false}
    answers = missing(programs)
    assert [one for one in answers if not one.startswith(false)] == []
    assert len(answers) == 1, "a name that does not exist is noticed"
