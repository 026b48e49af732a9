"""The command line with one invented framework: `driver.py FOLDER NAME COMMAND ...`."""

from __future__ import annotations

import pathlib
import sys

folder, name = sys.argv[1:3]
here = pathlib.Path(__file__).resolve()
sys.path[1:1] = [str(here.parents[2]), str(pathlib.Path(folder) / "site")]

from sparse_bridge.__main__ import main  # noqa: E402
from sparse_bridge.adapters import base  # noqa: E402

sys.path.insert(1, str(here.parent))
from fakes import FakeAdapter  # noqa: E402

base.ADAPTERS.clear()
base.register_for_testing(FakeAdapter(name, pathlib.Path(folder) / "standins"))
sys.exit(main(sys.argv[3:]))
