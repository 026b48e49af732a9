"""Sparse operations, hash table, box and point cloud utilities."""
