"""Shared kernel: standard library only, no I/O."""
