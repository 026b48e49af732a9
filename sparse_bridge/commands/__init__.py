"""Commands of `python -m sparse_bridge` that come with options of their own."""
