"""The compatibility matrix: models as projects write them, run through the bridge and compared.

Evidence, not product: part of the source checkout, never imported by `sparse_bridge`.
"""
