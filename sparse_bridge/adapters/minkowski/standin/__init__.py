"""Modules that answer `import MinkowskiEngine` where the original is missing.

They are loaded under the original's names, so the tree mirrors those; nothing imports this package.
"""
