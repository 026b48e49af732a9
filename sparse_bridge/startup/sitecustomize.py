"""Python imports this module when it starts, in child processes of `python -m sparse_bridge run`.

Programs start other Pythons, too: written for any release, and without effect there.
"""

import json
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_TEXT = os.environ.get("SPARSE_BRIDGE_INHERITED")

sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _HERE]
if _TEXT:
    _STATE = json.loads(_TEXT)
    if _STATE["python"] == [sys.prefix, sys.hexversion]:
        from importlib.util import module_from_spec, spec_from_file_location

        _SPEC = spec_from_file_location(_STATE["joining"], os.path.join(_HERE, "joining.py"))
        if _SPEC is not None and _SPEC.loader is not None:
            sys.modules[_SPEC.name] = _MODULE = module_from_spec(_SPEC)
            _SPEC.loader.exec_module(_MODULE)
            _MODULE.begin(_STATE)

# The module of this name that would have been imported without this one.
_OWN = sys.modules.pop("sitecustomize", None)
try:
    import sitecustomize  # noqa: F401
except ImportError as error:
    if "sitecustomize" not in str(error):
        raise
finally:
    if _OWN is not None:
        sys.modules.setdefault("sitecustomize", _OWN)
