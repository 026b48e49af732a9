"""Every form for every target: an hour of CPU time. Run with `-m targets`."""

from __future__ import annotations

import pytest

from sparse_bridge.kernels.runtime.architectures import compiled
from sparse_bridge.tools.offline_compile import running

pytestmark = pytest.mark.targets


@pytest.fixture(autouse=True)
def wanted(request):
    if "targets" not in request.config.option.markexpr:
        pytest.skip("compiles for an hour: run with -m targets")


@pytest.mark.parametrize("arch", compiled())
def test_every_form(arch):
    results = running.run(running.jobs_for([arch], full=True))
    assert [(r.form, r.problems) for r in running.failures(results)] == []
    assert len(results) > 200
