"""Who looks at single operations or lines of a program: such calls are not replayed, as they would see none."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from ...device.torch_compat import SAVED_TENSORS_HOOKS, transform

_monitoring: Any = getattr(sys, "monitoring", None)  # Python 3.12


def observer() -> str | None:
    """What looks on in this thread: a debugger, a mode of torch, hooks of saved tensors, a transform. None: nobody."""
    if sys.gettrace() is not None or _traces_lines():
        return "a debugger, or what measures coverage"
    if torch._C._len_torch_dispatch_stack():
        return f"the mode {_name(torch._C._get_dispatch_stack_at(torch._C._len_torch_dispatch_stack() - 1))}"
    for index in range(torch._C._len_torch_function_stack()):
        mode = torch._C._get_function_stack_at(index)
        if not isinstance(mode, DeviceContext):  # it only chooses where new tensors lie
            return f"the mode {_name(mode)}"
    if SAVED_TENSORS_HOOKS is not None and SAVED_TENSORS_HOOKS(False) is not None:
        return "hooks of saved tensors, as checkpoints set them"
    if transform() is not None or forward_ad._current_level >= 0:
        return "a transform of functions, or forward-mode derivatives"
    return "anomaly detection" if torch.is_anomaly_enabled() else None


def _name(mode: object) -> str:
    return type(mode).__name__


def _traces_lines() -> bool:
    if _monitoring is None:
        return False
    return any(_monitoring.get_tool(tool) is not None for tool in (_monitoring.DEBUGGER_ID, _monitoring.COVERAGE_ID))
