"""Machines that are a directory and processes of this computer."""
