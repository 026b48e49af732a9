"""What is quick, and what is slow."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import quick

CASES = """
import pytest

@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", "ab")
@pytest.mark.parametrize("number", range(3))
def test_alike(kind, number):
    pass

class TestOther:
    @pytest.mark.sample(1)
    @pytest.mark.parametrize("kind", ["a", pytest.param("g", marks=pytest.mark.gpu), "b"])
    def test_alike(self, kind):
        pass

def test_alone():
    pass
"""


class Slow:
    def pytest_collection_modifyitems(self, items):
        quick.mark_beyond_samples(items)
        self.names = [item.name for item in items if "slow" in item.keywords]


def test_cases_beyond_a_sample_are_slow(tmp_path):
    file = tmp_path / "test_cases.py"
    file.write_text(CASES)
    script = (
        "import pytest; from tests.test_quick import Slow; slow = Slow(); "
        f"pytest.main(['-q', '--collect-only', '--rootdir', {str(tmp_path)!r}, {str(file)!r}], [slow]); "
        "print('slow:', *slow.names)"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert (
        said.splitlines()[-1] == "slow: test_alike[1-a] test_alike[1-b] test_alike[2-a] test_alike[2-b] test_alike[b]"
    )


def test_named_parameters_are_quick():
    of = quick.quick([2], range(4))
    assert of[0] == 2 and [one.values[0] for one in of[1:]] == [0, 1, 3]
    assert all(one.marks[0].name == "slow" for one in of[1:])
    with pytest.raises(AssertionError, match="not there"):
        quick.quick([7], range(4))
