"""A shell and files on one machine."""
