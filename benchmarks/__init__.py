"""Benchmarks: `python -m benchmarks.step`, `.guard`, `.snapshot`, `.cache_memory`. Never run as tests."""
