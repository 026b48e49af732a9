from __future__ import annotations

import pytest

from tests.adapters.spconv import apis


@pytest.fixture(params=list(apis.APIS))
def sp(request, plain_settings):
    with apis.APIS[request.param]() as module:
        yield module


@pytest.fixture
def standin(plain_settings):
    with apis.standin() as module:
        yield module
