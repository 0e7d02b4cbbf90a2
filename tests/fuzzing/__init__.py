"""What `make fuzz` draws, and what it holds: modules of `tests/fuzz.py`."""
