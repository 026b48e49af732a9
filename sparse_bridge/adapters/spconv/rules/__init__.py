"""Rules that hold for all layers: the order of new rows, spconv's switches, rows outside."""
