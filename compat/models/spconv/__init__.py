"""Models of projects that use spconv, written as those projects write them."""
