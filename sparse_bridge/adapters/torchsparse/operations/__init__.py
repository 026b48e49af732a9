"""What runs over rows without kernel maps: norms, pools, sums of tensors, dense grids."""
