from __future__ import annotations

import pytest

from tests.adapters.spconv import doors


@pytest.fixture(params=list(doors.DOORS))
def sp(request, plain_settings):
    with doors.DOORS[request.param]() as module:
        yield module


@pytest.fixture
def standin(plain_settings):
    with doors.standin() as module:
        yield module
