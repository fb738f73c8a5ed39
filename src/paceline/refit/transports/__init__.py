"""Movers of weight bytes, reached by name through the registry."""
