"""Every kernel compiles with the oldest Triton that is supported.

Newer releases are covered by the compile check, which reads their assembly too; here a form of each
kernel and dtype has to come through, for an NVIDIA GPU (AMD's linker was not yet part of Triton).
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from sparse_bridge.kernels.runtime import target as targets
from sparse_bridge.kernels.runtime import triton_compat
from sparse_bridge.kernels.runtime.launch import OPTIONS
from sparse_bridge.tools.offline_compile import catalogue
from tests.conftest import INTERPRETED

pytestmark = [
    pytest.mark.skipif(triton_compat.VERSION >= (3, 5), reason="the compile check does this"),
    pytest.mark.skipif(INTERPRETED, reason="nothing is compiled here"),
]
TARGET = targets.described("sm_80")


def small_forms():
    """One form per kernel and dtype of its first argument."""
    found = {}
    for form in catalogue.covering(TARGET):
        found.setdefault((form.kernel, form.types[0]), form)
    return found


def test_every_kernel_and_dtype():
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    gpu = GPUTarget(TARGET.backend, TARGET.capability, TARGET.warp_size)
    found = small_forms()
    assert len(found) > 40
    for form in found.values():
        kernel = form.jit
        names = kernel.fn.arg_names
        types = zip(names, form.types, strict=False)
        signature = {name: kind for name, kind in types if name not in form.ones}
        constants = dict(zip(kernel.constants, form.constants, strict=True))
        constants |= dict.fromkeys(form.ones, 1)
        source = ASTSource(kernel.fn, signature, constants)
        made = triton.compile(source, target=gpu, options={**OPTIONS, **dict(form.options)})
        assert made.asm["cubin"], form
