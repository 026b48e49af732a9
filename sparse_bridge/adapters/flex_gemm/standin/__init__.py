"""Modules that answer `import flex_gemm` where the original is missing.

They are loaded under the original's name, so the tree mirrors it; nothing imports this package
itself.
"""
