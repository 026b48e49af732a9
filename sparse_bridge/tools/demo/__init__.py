"""A demonstration: a lidar scan through two spconv networks, with tables and a picture."""
