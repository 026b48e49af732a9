"""How cumm compiles at run time."""

from spconv.constants import NVRTCMode as NVRTCMode
