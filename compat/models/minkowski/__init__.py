"""Networks written for MinkowskiEngine."""
