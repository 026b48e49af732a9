from __future__ import annotations

import pytest

from tests.adapters.spconv import apis


@pytest.fixture(scope="session")
def _provider():
    """The package's own answers requests for maps from the first test on, whichever that is."""
    with apis.standin():
        pass


@pytest.fixture(autouse=True)
def _plain_settings(plain_settings, _provider):
    """For every test of this folder."""
