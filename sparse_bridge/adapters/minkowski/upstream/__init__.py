"""What emulates utilities of MinkowskiEngine and of its compiled backend."""
