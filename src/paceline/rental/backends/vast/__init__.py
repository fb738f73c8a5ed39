"""Vast.ai: a marketplace of other people's machines."""
