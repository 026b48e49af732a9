"""Modules that answer `import spconv` and `import cumm` where the originals are missing.

They are loaded under the originals' names, so the tree mirrors those; nothing imports this package.
"""
