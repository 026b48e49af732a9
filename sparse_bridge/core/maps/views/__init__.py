"""The views of a rulebook: what there is of them, and letting go of them."""
