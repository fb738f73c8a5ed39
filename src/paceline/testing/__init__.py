"""Clocks, faults, fakes and contracts for authors of adapters."""
