"""Where pickles of the original look for the activation enum."""
