"""A demonstration: a lidar scan through two spconv networks, with tables and a picture."""

VOXEL_SIZE = 0.1  # metres, where neither user nor file says another one
