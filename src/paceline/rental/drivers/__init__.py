"""Who rents, ends and compares with the record; `orchestrator.py` is the door to them."""
