"""The parts of ``benchmarks/transport.py``, one module per question."""
