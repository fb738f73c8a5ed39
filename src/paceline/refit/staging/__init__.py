"""Keeping a version's source bytes still until nobody reads them."""
