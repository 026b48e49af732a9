from __future__ import annotations

import pytest

from . import apis


@pytest.fixture(params=list(apis.APIS))
def sp(request):
    """`spconv.pytorch` through each API."""
    with apis.APIS[request.param]() as module:
        yield module


@pytest.fixture
def standin():
    """`spconv.pytorch` of the stand-in."""
    with apis.standin() as module:
        yield module


@pytest.fixture(autouse=True)
def _plain_settings(plain_settings):
    """For every test of this folder."""
