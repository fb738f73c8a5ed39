"""Paceline: rent anywhere, train here, roll out there, with weights that are what they say."""

__version__ = "0.1.0"
