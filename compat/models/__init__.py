"""Networks as projects write them, by framework."""
