"""Acceptance tests of a GPU: what `python -m sparse_bridge prove` runs.

A check is a function that yields outcomes. `runner` lists the checks and runs them, on a GPU in a
process that may crash. `record` makes lines, JSON and Markdown of the outcomes.
"""
