"""The compile check: every kernel compiled for every target, and what came out checked, without a
GPU.

`python -m sparse_bridge doctor --targets` runs it. Which forms of which kernels, `catalogue`
says; what must hold, `checks`.
"""
