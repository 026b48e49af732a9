"""What `kernels.target` answers about GPUs that are not here."""

from __future__ import annotations

import logging

import pytest

from sparse_bridge import log
from sparse_bridge.errors import DeviceError
from sparse_bridge.kernels.runtime import target as targets

# arch: backend, family, lanes, KiB of shared memory, bf16, TF32, matrix units
FACTS = {
    "gfx90a": ("hip", "cdna2", 64, 64, True, False, True),
    "gfx942": ("hip", "cdna3", 64, 64, True, True, True),
    "gfx950": ("hip", "cdna4", 64, 160, True, False, True),
    "gfx1100": ("hip", "rdna3", 32, 64, True, False, True),
    "gfx1151": ("hip", "rdna3", 32, 64, True, False, True),
    "gfx1201": ("hip", "rdna4", 32, 64, True, False, True),
    "sm_75": ("cuda", "turing", 32, 64, False, False, False),
    "sm_80": ("cuda", "ampere", 32, 163, True, True, True),
    "sm_86": ("cuda", "ampere", 32, 99, True, True, True),
    "sm_87": ("cuda", "ampere", 32, 163, True, True, True),
    "sm_89": ("cuda", "ada", 32, 99, True, True, True),
    "sm_90": ("cuda", "hopper", 32, 227, True, True, True),
    "sm_100": ("cuda", "blackwell", 32, 227, True, True, True),
    "sm_103": ("cuda", "blackwell", 32, 227, True, True, True),
    "sm_120": ("cuda", "blackwell", 32, 99, True, True, True),
    "sm_121": ("cuda", "blackwell", 32, 99, True, True, True),
    # Nobody has tabulated these: what their capability promises, in the least memory there is.
    "gfx908": ("hip", "generic", 64, 64, True, False, False),
    "gfx1030": ("hip", "generic", 32, 64, True, False, False),
    "sm_130": ("cuda", "generic", 32, 48, True, True, True),
}


@pytest.mark.parametrize("arch", FACTS)
def test_facts(arch):
    t = targets.described(arch, compute_units=7)
    assert (t.arch, t.compute_units, t.raw) == (arch, 7, False)
    kib = t.shared_memory >> 10
    units = (t.has_bf16, t.has_tf32, t.has_matrix_units)
    assert (t.backend, t.family, t.warp_size, kib, *units) == FACTS[arch]


def test_the_interpreter_is_no_gpu():
    t = targets.Target("interpreter", "interpreter", 32, 4, 1 << 20, raw=False)
    assert (t.family, t.capability) == ("generic", 0)
    assert t.has_tf32 and not (t.has_bf16 or t.has_matrix_units)


def test_an_unknown_gpu_is_told_once(caplog):
    log.reset()
    with caplog.at_level(logging.INFO, "sparse_bridge"):
        targets.described("sm_140")
        targets.described("sm_140")
        targets.described("sm_90")
    (record,) = caplog.records
    assert "sm_140 is not in the tile tables" in record.message and "48 KiB" in record.message


@pytest.mark.parametrize("name", ["gfx", "gfx9", "sm90", "sm_", "h200", "", "gfx942 "])
def test_what_is_no_architecture(name):
    with pytest.raises(DeviceError, match="expected a name like gfx942 or sm_90"):
        targets.described(name)
