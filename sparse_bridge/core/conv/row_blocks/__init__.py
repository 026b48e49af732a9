"""Convolutions under a limit on memory: in blocks of rows, where one piece would be too much."""
