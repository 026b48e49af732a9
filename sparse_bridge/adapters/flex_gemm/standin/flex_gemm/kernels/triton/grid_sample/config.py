"""Tile configurations; the engine chooses its own."""

autotune_config = []
