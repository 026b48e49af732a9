"""The proof that a GPU computes rightly: what `python -m sparse_bridge prove` runs.

`checks` names the checks, each a function that yields outcomes; `runner` runs them, on a GPU in a
process that may crash; `record` makes lines, JSON and Markdown of the outcomes.
"""
