"""ROCm, whose replayed graphs have given wrong data: nothing is replayed unasked."""

from __future__ import annotations

import logging
import types

import pytest

from sparse_bridge import log, settings
from sparse_bridge.core.capture import graph_key
from sparse_bridge.refusals import Why


@pytest.mark.parametrize("capture, replayed", [("prefetch", False), ("always", True)])
def test_models_are_replayed_on_rocm_only_if_the_settings_say_so(fake_gpu, caplog, capture, replayed):
    features = types.SimpleNamespace(is_cuda=True)
    fake_gpu.has(capturing=False)
    log.reset()
    with settings.override(capture=capture), caplog.at_level(logging.INFO, "sparse_bridge"):
        assert graph_key.why_not_capturable(features) is None
        fake_gpu.has(hip="7.2.1")
        for _ in range(2):
            assert graph_key.why_not_capturable(features) is (None if replayed else Why.GRAPH_ROCM)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (not replayed) and all("SPARSE_BRIDGE_CAPTURE=always" in s for s in said)
