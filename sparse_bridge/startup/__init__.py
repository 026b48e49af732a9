"""What Python runs first in child processes of `python -m sparse_bridge run`: this folder stands on
their PYTHONPATH."""
