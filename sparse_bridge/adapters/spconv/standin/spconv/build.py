"""Nothing is compiled ahead of time."""
