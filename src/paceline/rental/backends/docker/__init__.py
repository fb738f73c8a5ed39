"""Containers of a Docker engine that you can reach already."""
