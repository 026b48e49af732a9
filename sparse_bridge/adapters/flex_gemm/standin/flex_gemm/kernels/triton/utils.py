"""Kept for its name."""
