from __future__ import annotations

import pytest

from . import doors


@pytest.fixture(params=list(doors.DOORS))
def sp(request):
    """`spconv.pytorch` through each door."""
    with doors.DOORS[request.param]() as module:
        yield module


@pytest.fixture
def standin():
    """`spconv.pytorch` of the stand-in."""
    with doors.standin() as module:
        yield module


@pytest.fixture(autouse=True)
def _plain_settings(plain_settings):
    """For every test of this folder."""
